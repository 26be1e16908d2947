"""What steps and rounds take beyond what their sizes say: transport, waiting, contexts, a busy machine."""

from __future__ import annotations

# How much a measurement counts against those before it, once there are a few: for what all γ have in common,
# which changes with the machine's other work, and for what is one γ's own, which hardly changes.
_COMMON_WEIGHT = 0.1
_OWN_WEIGHT = 0.03
_NUM_PRIOR = 4.0
# The most that a measurement is believed to be off. So the estimate is near the median: a step that took ten
# times as long moves it no further than one that was a little slow.
_MOST_ERROR = 0.12


class _Estimate:
    """A value that learns from errors, faster at first."""

    def __init__(self, weight: float, value: float = 0.0) -> None:
        self.value = value
        self.count = 0.0
        self._weight = weight

    def learn(self, error: float, weight: float) -> None:
        self.count += weight
        self.value += weight * max(self._weight, 1 / (self.count + _NUM_PRIOR)) * error


class Overhead:
    """The share by which things take longer than expected (negative: shorter), by load and γ (0: plain decoding).

    Loads count alike within a power of two.
    """

    def __init__(self) -> None:
        self._common: dict[int, _Estimate] = {}
        self._own: dict[tuple[int, int], _Estimate] = {}

    def share(self, load: int, gamma: int) -> float:
        """What was learnt for this load, else for the nearest, and for this γ; 0 before anything was."""
        own = self._own.get((load.bit_length(), gamma))
        return self._nearest(load) + (own.value if own is not None else 0.0)

    def count(self, load: int, gamma: int) -> float:
        """How many measurements of this load and γ there were."""
        own = self._own.get((load.bit_length(), gamma))
        return own.count if own is not None else 0.0

    def observe(self, load: int, gamma: int, expected: float, seconds: float, weight: float) -> None:
        """What should have taken `expected` seconds took `seconds`. `weight`, in (0, 1], is its say: what many
        see of the same step counts once."""
        error = seconds / expected - 1 - self.share(load, gamma)
        error = min(max(error, -_MOST_ERROR), _MOST_ERROR)
        bucket = load.bit_length()
        if bucket not in self._common:
            self._common[bucket] = _Estimate(_COMMON_WEIGHT, self._nearest(load))
        self._common[bucket].learn(error, weight)
        self._own.setdefault((bucket, gamma), _Estimate(_OWN_WEIGHT)).learn(error, weight)

    def _nearest(self, load: int) -> float:
        if not self._common:
            return 0.0
        bucket = load.bit_length()
        return self._common[min(self._common, key=lambda seen: abs(seen - bucket))].value
