"""What steps and rounds take beyond what their sizes say: transport, waiting, contexts, a busy machine."""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from statistics import median

# How much a measurement counts against those before it: for what all shapes have in common, which changes with the
# machine's other work, once there are a few, and for what is one shape's own, which hardly changes.
_COMMON_WEIGHT = 0.1
_OWN_WEIGHT = 0.01
_NUM_PRIOR = 4.0
_COMMON_WEIGHT_OF_NEW = 0.02
_NUM_PRIOR_OF_NEW = 2.0
# The most that a measurement is believed to be off. So the estimate is near the median: a step that took ten
# times as long moves it no further than one that was a little slow.
_MOST_ERROR = 0.09
# But so many in a row that are off by more than this, on the same side, are no accident, as long as there were
# few: it was never known.
_LARGE_ERROR = 0.25
_NUM_IN_A_ROW = 4.0
_NUM_FEW = 16.0
# So many measurements of a load say more than those of others.
_NUM_KNOWN = 3.0
# While others are made, what was learnt of a shape counts e times less after so many rounds: the machine may have been
# slower or faster then, and what of it is its own is not told apart for ever. Tried again, it learns fast.
_MEMORY_ROUNDS = 16.0
_LEAST_RECENT = 1e-300
# How much a measurement on purpose counts; one with a large error counts wholly.
_CORRECTION = 0.5


@functools.lru_cache(maxsize=1024)
def nearest_power(load: int) -> int:
    """The power of two nearest to a load, as its exponent, by ratio: what is learnt of loads is learnt for these.

    So 6 to 11 count alike, and a service of 8 or 32 streams stays within one while some of them have no token yet.
    """
    return round(math.log2(max(1, load)))


def forgotten(num_recent: float, weight: float) -> float:
    """What is left of so many measurements behind another one, of something else, with that weight; never nothing, as
    its logarithm says how long ago they were."""
    return max(num_recent * (1 - weight / _MEMORY_ROUNDS), min(num_recent, _LEAST_RECENT))


@dataclass(slots=True)
class _Estimate:
    """A value, of how many measurements, and how many of them still say how things are now."""

    value: float = 0.0
    count: float = 0.0
    num_recent: float = 0.0

    def learn(self, error: float, weight: float, rate: float) -> None:
        self.count += weight
        self.num_recent += weight
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
    """The share by which things take longer than expected (negative: shorter), by load and what is
    done: rounds of a shape, or plain steps.

    Loads count alike around a power of two. Kept and learnt as logarithms of 1 + share.
    """

    def __init__(self) -> None:
        self._common: dict[int, _Estimate] = {}
        self._own: dict[tuple[int, Hashable], _Estimate] = {}
        self._runs: dict[tuple[int, Hashable], _Run] = {}
        # Where a measurement on purpose said something quite different, and not enough since.
        self._surprised: set[int] = set()

    def share(self, load: int, what: Hashable) -> float:
        """What was learnt for this load, else for the nearest, and for this shape; 0 before anything was."""
        return math.exp(self._logarithm(load, what)) - 1

    def bucket(self, load: int) -> int:
        """The power of two from whose measurements the share for this load comes: its own, if there were a few."""
        wanted = nearest_power(load)
        own = self._common.get(wanted)
        if own is not None and own.count >= _NUM_KNOWN:
            return wanted
        known = [bucket for bucket, common in self._common.items() if common.count >= _NUM_KNOWN]
        return min(known or self._common, key=lambda seen: abs(seen - wanted), default=wanted)

    def is_known(self, load: int) -> bool:
        """Whether there were any of this load."""
        bucket = nearest_power(load)
        return any(its_bucket == bucket and own.count > 0 for (its_bucket, _), own in self._own.items())

    def count(self, load: int, what: Hashable) -> float:
        """How many measurements of this load and shape there were."""
        own = self._own.get((nearest_power(load), what))
        return own.count if own is not None else 0.0

    def num_recent(self, load: int, what: Hashable) -> float:
        """The same, where what is long ago counts less."""
        own = self._own.get((nearest_power(load), what))
        return own.num_recent if own is not None else 0.0

    def observe(self, load: int, what: Hashable, expected: float, seconds: float, weight: float) -> float | None:
        """What should have taken `expected` seconds took `seconds`. `weight`, in (0, 1], is its say: what many
        see of the same step counts once. Returns by how much (a logarithm) everything at this load takes longer, where
        it was well known before, else 0; None if the share turns out to be quite another."""
        bucket = nearest_power(load)
        common, own = self._estimates(load, what)
        self._forget_others(bucket, what, weight)
        error = math.log(seconds / expected) - common.value - own.value
        known_from_others = common.count >= _NUM_FEW
        if bucket in self._surprised:  # by what was seen since
            known_from_others = any(
                each.num_recent >= _NUM_KNOWN and (its_bucket, its_what) != (bucket, what)
                for (its_bucket, its_what), each in self._own.items()
                if its_bucket == bucket
            )
        # Of a shape that is new beside others the first measurements say what is its own.
        new_beside_others = known_from_others and own.num_recent < _NUM_FEW
        if common.count < _NUM_FEW or new_beside_others:
            run = self._runs.setdefault((bucket, what), _Run())
            run.add(error, weight)
            if run.weight >= _NUM_IN_A_ROW:
                (own if new_beside_others else common).value += min(run.errors, key=abs)
                del self._runs[bucket, what]
                return None
        known = common.count >= _NUM_FEW
        if known:
            self._surprised.discard(bucket)
        before = common.value
        error = min(max(error, -_MOST_ERROR), _MOST_ERROR)
        if new_beside_others:
            common.learn(error, weight, _COMMON_WEIGHT_OF_NEW)
            own.learn(error, weight, max(_OWN_WEIGHT, 1 / (own.num_recent + _NUM_PRIOR_OF_NEW)))
        else:
            common.learn(error, weight, max(_COMMON_WEIGHT, 1 / (common.count + _NUM_PRIOR)))
            own.learn(error, weight, _OWN_WEIGHT)
        return common.value - before if known else 0.0

    def is_surprised(self, load: int, what: Hashable, measured: Sequence[tuple[float, float]]) -> bool:
        """Whether that, measured on purpose, would not be believed but for being measured."""
        return abs(self._error(load, what, measured)) > _LARGE_ERROR

    def correct(self, load: int, what: Hashable, measured: Sequence[tuple[float, float]]) -> None:
        """Measured on purpose, at least once: what should have taken so many seconds took so many."""
        error = self._error(load, what, measured)
        before = self._nearest(load)
        common, _ = self._estimates(load, what)
        surprised = abs(error) > _LARGE_ERROR
        share = 1.0 if surprised else max(_CORRECTION, 1 / (common.count + 1))
        common.value = before + share * error
        # Nothing but this speaks for something quite different, and what speaks against it now is no accident either.
        common.count = _NUM_KNOWN if surprised else max(common.count, _NUM_FEW)
        bucket = nearest_power(load)
        if surprised:
            self._surprised.add(bucket)
            for (its_bucket, _), own in self._own.items():
                if its_bucket == bucket:
                    own.num_recent = 0.0

    def rescale(self, load: int, factor: float) -> None:
        """What is expected at this load is from now on so many times less, and what was learnt as much more."""
        if self._common:
            self._common[self.bucket(load)].value += math.log(factor)

    def _forget_others(self, bucket: int, what: Hashable, weight: float) -> None:
        for (its_bucket, its_what), own in self._own.items():
            if its_bucket == bucket and its_what != what:
                own.num_recent = forgotten(own.num_recent, weight)

    def _error(self, load: int, what: Hashable, measured: Sequence[tuple[float, float]]) -> float:
        return median(math.log(seconds / expected) for expected, seconds in measured) - self._logarithm(load, what)

    def _estimates(self, load: int, what: Hashable) -> tuple[_Estimate, _Estimate]:
        """What all shapes have in common, and this one's own."""
        bucket = nearest_power(load)
        common, own = self._common.get(bucket), self._own.get((bucket, what))
        if common is None:
            common = self._common[bucket] = _Estimate(self._nearest(load))
        if own is None:
            own = self._own[bucket, what] = _Estimate()
        return common, own

    def _logarithm(self, load: int, what: Hashable) -> float:
        own = self._own.get((nearest_power(load), what))
        return self._nearest(load) + (own.value if own is not None else 0.0)

    def _nearest(self, load: int) -> float:
        return self._common[self.bucket(load)].value if self._common else 0.0
