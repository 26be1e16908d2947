"""What steps and rounds take beyond what their sizes say: transport, waiting, contexts, a busy machine."""

from __future__ import annotations

import math
from dataclasses import dataclass

# How much a measurement counts against those before it: for what all γ have in common, which changes with the
# machine's other work, once there are a few, and for what is one γ's own, which hardly changes.
_COMMON_WEIGHT = 0.1
_OWN_WEIGHT = 0.03
_NUM_PRIOR = 4.0
# The most that a measurement is believed to be off. So the estimate is near the median: a step that took ten
# times as long moves it no further than one that was a little slow.
_MOST_ERROR = 0.09
# But so many in a row that are off by more than this, on the same side, are no accident, as long as there were
# few: it was never known.
_LARGE_ERROR = 0.25
_NUM_IN_A_ROW = 4.0
_NUM_FEW = 16.0


@dataclass(slots=True)
class _Estimate:
    """A value, and of how many measurements."""

    value: float = 0.0
    count: float = 0.0

    def learn(self, error: float, weight: float, rate: float) -> None:
        self.count += weight
        self.value += weight * rate * error


class _Run:
    """Large errors in a row, on the same side; `weight`: of how many steps."""

    def __init__(self) -> None:
        self.errors: list[float] = []
        self.weight = 0.0

    def add(self, error: float, weight: float) -> None:
        if abs(error) <= _LARGE_ERROR or (self.errors and (error > 0) != (self.errors[0] > 0)):
            self.errors, self.weight = [], 0.0
        if abs(error) > _LARGE_ERROR:
            self.errors.append(error)
            self.weight += weight


class Overhead:
    """The share by which things take longer than expected (negative: shorter), by load and γ (0: plain decoding).

    Loads count alike within a power of two. Kept and learnt as logarithms of 1 + share.
    """

    def __init__(self) -> None:
        self._common: dict[int, _Estimate] = {}
        self._own: dict[tuple[int, int], _Estimate] = {}
        self._runs: dict[int, _Run] = {}

    def share(self, load: int, gamma: int) -> float:
        """What was learnt for this load, else for the nearest, and for this γ; 0 before anything was."""
        return math.exp(self._logarithm(load, gamma)) - 1

    def bucket(self, load: int) -> int:
        """The power of two from whose measurements the share for this load comes."""
        wanted = load.bit_length()
        return min(self._common, key=lambda seen: abs(seen - wanted), default=wanted)

    def count(self, load: int, gamma: int) -> float:
        """How many measurements of this load and γ there were."""
        own = self._own.get((load.bit_length(), gamma))
        return own.count if own is not None else 0.0

    def observe(self, load: int, gamma: int, expected: float, seconds: float, weight: float) -> bool:
        """What should have taken `expected` seconds took `seconds`. `weight`, in (0, 1], is its say: what many
        see of the same step counts once. Returns whether the share turns out to be quite another."""
        error = math.log(seconds / expected) - self._logarithm(load, gamma)
        bucket = load.bit_length()
        if bucket not in self._common:
            self._common[bucket] = _Estimate(self._nearest(load))
            self._runs[bucket] = _Run()
        common, run = self._common[bucket], self._runs[bucket]
        run.add(error, weight)
        if run.weight >= _NUM_IN_A_ROW and common.count < _NUM_FEW:
            common.value += min(run.errors, key=abs)
            self._runs[bucket] = _Run()
            return True
        error = min(max(error, -_MOST_ERROR), _MOST_ERROR)
        common.learn(error, weight, max(_COMMON_WEIGHT, 1 / (common.count + _NUM_PRIOR)))
        self._own.setdefault((bucket, gamma), _Estimate()).learn(error, weight, _OWN_WEIGHT)
        return False

    def _logarithm(self, load: int, gamma: int) -> float:
        own = self._own.get((load.bit_length(), gamma))
        return self._nearest(load) + (own.value if own is not None else 0.0)

    def _nearest(self, load: int) -> float:
        return self._common[self.bucket(load)].value if self._common else 0.0
