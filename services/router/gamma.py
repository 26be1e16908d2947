"""How many tokens to draft: from measured acceptance and measured costs, down to none at all."""

from __future__ import annotations

import bisect
import math
import time
from collections.abc import Callable, Sequence

# How much a new measurement counts against those before it.
_WEIGHT = 0.1
# A round must promise this much more than plain decoding: costs are measured with noise, and changing
# between the two costs something itself.
_MARGIN = 1.1
# Before anything was drafted.
_PRIOR_ACCEPTANCE = 0.7
# A sequence's own acceptance rate starts from everybody's, which counts as this many draft tokens.
_PRIOR_TOKENS = 16.0
# And forgets: draft tokens it remembers at most.
_MEMORY_TOKENS = 128.0
# While nothing is drafted, one round in this many rounds' time still is, to notice when it would pay again.
_PROBE_EVERY = 200.0
# What a probe assumes, to tell "the drafter guesses badly" (worth another look) from "no drafter could pay".
_GOOD_ACCEPTANCE = 0.9


class StepCosts:
    """Seconds of a worker's step as a function of the tokens in it.

    Starts from the worker's own warm-up measurements; `observe` refines them. Between measured sizes
    it is linear.
    """

    def __init__(self, measured: Sequence[tuple[int, float]]) -> None:
        """`measured`: (tokens, seconds), by increasing size, at least one."""
        self._sizes = [size for size, _ in measured]
        self._seconds = [seconds for _, seconds in measured]

    def seconds(self, num_tokens: float) -> float:
        # Beyond the largest size steps are bound by arithmetic.
        scale = max(1.0, num_tokens / self._sizes[-1])
        return scale * sum(self._seconds[index] * share for index, share in self._shares(num_tokens))

    def observe(self, num_tokens: int, seconds: float) -> None:
        """A step of that many tokens took that long: moves the measurements around it."""
        error = seconds / self.seconds(num_tokens) - 1
        for index, share in self._shares(num_tokens):
            self._seconds[index] *= 1 + _WEIGHT * share * error

    def _shares(self, num_tokens: float) -> list[tuple[int, float]]:
        """The measurements around a size, by index, and how much each has a say in it."""
        above = bisect.bisect_left(self._sizes, num_tokens)
        if above == 0:
            return [(0, 1.0)]
        if above == len(self._sizes):
            return [(above - 1, 1.0)]
        low, high = self._sizes[above - 1], self._sizes[above]
        share = (num_tokens - low) / (high - low)
        return [(above - 1, 1 - share), (above, share)]


class Acceptance:
    """Acceptance rate α: the chance that a draft token is kept, given that those before it were.

    `prior` is whose rate a new sequence starts from; it learns from every observation too.
    """

    def __init__(self, prior: Acceptance | None = None) -> None:
        self._prior = prior
        self._num_examined = 0.0
        self._num_accepted = 0.0

    @property
    def rate(self) -> float:
        start = _PRIOR_ACCEPTANCE if self._prior is None else self._prior.rate
        return (self._num_accepted + _PRIOR_TOKENS * start) / (self._num_examined + _PRIOR_TOKENS)

    def observe(self, num_draft_tokens: int, num_accepted: int) -> None:
        """One round's outcome. Draft tokens behind the first rejected one say nothing."""
        self._num_accepted += num_accepted
        self._num_examined += min(num_accepted + 1, num_draft_tokens)
        if self._num_examined > _MEMORY_TOKENS:
            scale = _MEMORY_TOKENS / self._num_examined
            self._num_accepted *= scale
            self._num_examined *= scale
        if self._prior is not None:
            self._prior.observe(num_draft_tokens, num_accepted)


def expected_tokens(acceptance_rate: float, num_draft_tokens: int) -> float:
    """E = (1 - α^(γ+1)) / (1 - α): tokens that a round of γ draft tokens commits on average.

    Leviathan et al. 2023, equation 1.
    """
    if acceptance_rate >= 1.0:
        return num_draft_tokens + 1.0
    return (1.0 - acceptance_rate ** (num_draft_tokens + 1)) / (1.0 - acceptance_rate)


class GammaController:
    """Chooses γ for the sequences of one target worker and the drafter.

    A round of γ draft tokens of all L sequences there costs T(L (γ + 1)) + γ D(L), by the step costs of
    target and drafter; a plain step T(L). What rounds and plain steps really took, waiting and transport
    included, corrects either by a factor, kept per power of two of L. The γ with the most expected tokens
    a second wins; 0 unless that is clearly more than plain decoding.
    """

    def __init__(
        self,
        target: StepCosts,
        draft: StepCosts,
        max_num_draft_tokens: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.target = target
        self.draft = draft
        self.acceptance = Acceptance()
        self._max_num_draft_tokens = max_num_draft_tokens
        self._clock = clock
        self._round_factors: dict[int, float] = {}
        self._plain_factors: dict[int, float] = {}
        self._last_round = -math.inf

    def choose(self, acceptance_rate: float, load: int, num_unseen_tokens: int = 0) -> int:
        """Draft tokens for the next round of one of `load` sequences, at most what was set as the most.

        `num_unseen_tokens`: committed tokens that the drafter would have to catch up with first.
        """
        best = self._best(acceptance_rate, load, _known(self._round_factors, load))
        if best == 0 and self._probe_is_due(load, num_unseen_tokens):
            self._last_round = self._clock()
            return min(2, self._max_num_draft_tokens)
        return best

    def pays(self, acceptance_rate: float, load: int) -> bool:
        """Whether drafting promises more than plain decoding now; offers no probe."""
        return self._best(acceptance_rate, load, _known(self._round_factors, load)) > 0

    def observe_round(self, load: int, num_draft_tokens: int, seconds: float) -> None:
        """A round of γ draft tokens among `load` sequences took that long, from asking the drafter to the result."""
        self._last_round = self._clock()
        _learn(self._round_factors, load, seconds / self._round_seconds(load, num_draft_tokens))

    def observe_plain(self, load: int, seconds: float) -> None:
        """A plain decode step among `load` sequences took that long, from result to result."""
        _learn(self._plain_factors, load, seconds / self.target.seconds(load))

    def _best(self, acceptance_rate: float, load: int, round_factor: float) -> int:
        plain = self.target.seconds(load) * _known(self._plain_factors, load)
        best, best_rate = 0, _MARGIN / plain
        for gamma in range(1, self._max_num_draft_tokens + 1):
            rate = expected_tokens(acceptance_rate, gamma) / (self._round_seconds(load, gamma) * round_factor)
            if rate > best_rate:
                best, best_rate = gamma, rate
        return best

    def _round_seconds(self, load: int, num_draft_tokens: int) -> float:
        verify = self.target.seconds(load * (num_draft_tokens + 1))
        return verify + num_draft_tokens * self.draft.seconds(load)

    def _probe_is_due(self, load: int, num_unseen_tokens: int) -> bool:
        if self._best(_GOOD_ACCEPTANCE, load, 1.0) == 0:
            return False
        cost = self._round_seconds(load, 2) + self.draft.seconds(max(1, num_unseen_tokens))
        return self._clock() - self._last_round > _PROBE_EVERY * cost


def _bucket(load: int) -> int:
    return load.bit_length()


def _known(factors: dict[int, float], load: int) -> float:
    """The factor of this load, else of the nearest one that was seen: all sequences come to a new load at
    once, and must not all try their luck there."""
    bucket = _bucket(load)
    return factors[min(factors, key=lambda seen: abs(seen - bucket))] if factors else 1.0


def _learn(factors: dict[int, float], load: int, factor: float) -> None:
    # A step of many sequences is seen by each of them, and counts once.
    weight = _WEIGHT / load
    factors[_bucket(load)] = (1 - weight) * _known(factors, load) + weight * factor
