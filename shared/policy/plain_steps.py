"""What plain decode steps take: learnt from all of them, and measured on purpose when it matters."""

from __future__ import annotations

import math
from statistics import fmean

from shared.policy.overhead import Overhead, nearest_power
from shared.policy.step_costs import StepCosts

# Results that were held up come in quick succession behind a long wait: what seems so much faster than expected is
# taken together with the next, so many at most.
_LEAST_SHARE = 0.5
_MOST_TOGETHER = 4
# A measurement on purpose takes so many steps, and as many again if it says something quite different: two stalls of
# the machine may fall into one.
_MEASURED_STEPS = 6
# One that said something quite different is made again so soon, in seconds and in steps, and then each time in twice as
# long: what it met may have been a bad moment.
_AGAIN_SECONDS = 1.0
_AGAIN_STEPS = 100
# Fewer than so many in a row, between those of other loads, say little of what they take while such a load lasts: where
# a crowd ends its last ones are slowed down by all that ends with it.
_STEPS_THAT_SETTLE = 16
# Loads that are so many times as large, or as small, are measured together.
_MOST_APART = 2
# While there are none, they are taken to become slower and faster with the rounds, by so much (a logarithm) since they
# were last measured: it may be the drafter's machine alone.
_MOST_FOLLOWED = 0.15
# What a step brought one sequence counts so much against those before it.
_TOKENS_WEIGHT = 0.02


class PlainSteps:
    """Plain decode steps of one target worker, by load.

    While drafting goes on there are none to learn from, and the machine may have become slower or faster. Then
    everybody decodes plainly for a few steps. Times are seconds: `now` of the clock, `busy` of it without pauses.
    """

    def __init__(self, target: StepCosts) -> None:
        self._target = target
        self._overhead = Overhead()
        # When they were last seen, in busy seconds, by power of two of the load.
        self._seen_at: dict[int, float] = {}
        # Steps still to be measured, from when on, and what was: expected and real seconds.
        self._num_to_measure = 0
        self._measured_load = 0
        self._measured_from = -math.inf
        self._measured: list[tuple[float, float]] = []
        self._too_fast: list[float] = []
        self._followed: dict[int, float] = {}  # by power of two of the load
        # How soon those of a load are measured again, as long as that is sooner than whoever asks would; and where the
        # latest measurement was a surprise.
        self._again: dict[int, float] = {}
        self._surprised: set[int] = set()
        # By the same: of which too few were seen in a row; and of which there were how many last.
        self._unsettled: set[int] = set()
        self._run: tuple[int, int] = 0, 0
        # What they bring a sequence, likewise, where that was ever more than one.
        self._tokens: dict[int, float] = {}

    @property
    def measuring(self) -> bool:
        return self._num_to_measure > 0

    def share(self, load: int) -> float:
        """By which share they take longer than measured at warm-up."""
        return self._overhead.share(load, 0)

    def seconds(self, load: int) -> float:
        return self._target.seconds(load) * (1 + self.share(load))

    def tokens(self, load: int) -> float:
        """What one brings a sequence: more than one token where the target drafts itself."""
        return self._tokens.get(nearest_power(load), 1.0)

    @property
    def bring_several(self) -> bool:
        """Whether they were ever seen to bring more than one token."""
        return bool(self._tokens)

    def observe_tokens(self, load: int, num_tokens: int) -> None:
        """One brought a sequence so many."""
        if num_tokens <= 1 and not self._tokens:
            return
        bucket = nearest_power(load)
        before = self._tokens.get(bucket, 1.0)
        self._tokens[bucket] = before + _TOKENS_WEIGHT * (max(num_tokens, 1) - before)

    def measure_if_older(
        self, load: int, seconds: float, busy: float, measured_from: float, at_once: bool = True
    ) -> bool:
        """Has them measured from then on, if none were seen for so long. Returns whether it does.

        Those never seen are measured `at_once`, or else after so many seconds.
        """
        bucket = nearest_power(load)
        if not at_once:
            self._seen_at.setdefault(bucket, busy)
        if busy - self._seen_at.get(bucket, -math.inf) <= self._due(bucket, seconds):
            return False
        self._num_to_measure, self._measured, self._measured_from = _MEASURED_STEPS, [], measured_from
        self._measured_load = load
        self._seen_at[bucket] = busy
        return True

    def is_settled(self, load: int) -> bool:
        """Whether what they take is not only known from the ends of other loads."""
        return nearest_power(load) not in self._unsettled

    def give_up_measuring(self) -> None:
        """Those whose steps were to be measured are gone."""
        self._num_to_measure = 0

    def measure_soon(self, load: int, seconds: float, rest: float) -> None:
        """What was seen, which would be measured again after so many `seconds`, counts as so old that only the `rest`
        of them is left."""
        bucket = nearest_power(load)
        self._seen_at[bucket] -= max(0.0, self._due(bucket, seconds) - rest)

    def follow(self, load: int, change: float) -> None:
        """The rounds that go on at this load, each of which holds a plain step, take longer by that (a logarithm)."""
        bucket = nearest_power(load)
        before = self._followed.get(bucket, 0.0)
        followed = min(max(before + change, -_MOST_FOLLOWED), _MOST_FOLLOWED)
        self._overhead.rescale(load, math.exp(followed - before))
        self._followed[bucket] = followed

    def observe(self, load: int, seconds: float, now: float, busy: float) -> bool:
        """One of `load` sequences took that long; told once. Returns whether that ends a measurement."""
        if self.measuring and now - seconds < self._measured_from:
            return False
        if self.measuring and not 1 / _MOST_APART <= load / self._measured_load <= _MOST_APART:
            self.give_up_measuring()  # what was to be known of another load is of no use now
            return True
        self._seen_at[nearest_power(load)] = busy
        if not self.measuring:
            self._note_run(nearest_power(load))
        expected = self._target.seconds(load)
        if self._too_fast or seconds < _LEAST_SHARE * self.seconds(load):
            self._too_fast.append(seconds)
            seconds = fmean(self._too_fast)
            if seconds < _LEAST_SHARE * self.seconds(load) and len(self._too_fast) < _MOST_TOGETHER:
                return False
            self._too_fast = []
        if not self.measuring:
            self._followed.pop(nearest_power(load), None)
            self._overhead.observe(load, 0, expected, seconds, 1.0)
            return False
        self._measured.append((expected, seconds))
        self._num_to_measure -= 1
        if self.measuring:
            return False
        bucket = nearest_power(load)
        surprised = self._overhead.is_surprised(load, 0, self._measured)
        if len(self._measured) == _MEASURED_STEPS and surprised:
            self._num_to_measure = _MEASURED_STEPS
            return False
        if surprised and bucket not in self._surprised:
            self._again[bucket] = max(_AGAIN_SECONDS, _AGAIN_STEPS * expected)
        elif bucket in self._again:
            self._again[bucket] *= 2
        (self._surprised.add if surprised else self._surprised.discard)(bucket)
        self._unsettled -= {bucket, nearest_power(self._measured_load)}
        self._run = bucket, _STEPS_THAT_SETTLE
        self._overhead.correct(load, 0, self._measured)
        self._followed.pop(bucket, None)
        return True

    def _due(self, bucket: int, seconds: float) -> float:
        """After how long those of a load are measured again, for who would after so many seconds."""
        return min(seconds, self._again.get(bucket, math.inf))

    def _note_run(self, bucket: int) -> None:
        before, num = self._run
        if bucket == before:
            num += 1
        else:
            if 0 < num < _STEPS_THAT_SETTLE:
                self._unsettled.add(before)
            num = 1
        self._run = bucket, num
        if num >= _STEPS_THAT_SETTLE:
            self._unsettled.discard(bucket)
