"""Whether a target drafts for itself, how far, and how many of the tokens it verifies: by measured goodput."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Final, NamedTuple

from shared.policy.overhead import nearest_power
from shared.policy.step_costs import StepCosts
from shared.policy.verify_costs import VerifyCosts
from shared.policy.ways import Way, Ways

# A step counts for no more than so many times those before it, or what a plain one should take: a machine that stands
# still for a moment says nothing.
_MOST_TIMES: Final = 4.0
# A new measurement of what drafting takes counts so much against those before it, and of what taking in does, which
# is rarely to be had.
_WEIGHT: Final = 0.1
_WEIGHT_OF_FOLLOWING: Final = 0.3
# A wait is believed to be no longer than so many plain steps, and what a step waits on average counts as no more than
# so many: somebody who reads slowly must not decide for whoever comes next.
_LONGEST_WAIT: Final = 64.0
_MOST_WAITED: Final = 4.0
# The first steps of the drafter of about so many rows are made whatever they take, and the shortest of them counts: to
# begin with something may be compiled, captured or allocated.
_FIRST_STEPS: Final = 3
# What sequences are taken to write before any has ended, in tokens.
_USUAL_LENGTH: Final = 256.0
# What share of plain steps drafting spares at best, but for rare texts.
_MOST_SPARED: Final = 0.5
# So much of what nobody looks for any more, as too little of it was found, is thought to be there after all, each time.
_FORGOTTEN: Final = 0.002
# And so much of what taking in seems to cost, each time that this speaks against it.
_FORGOTTEN_OF_FOLLOWING: Final = 0.0005
# Of plain steps one in so many is told of: they say it all.
PLAIN_STEPS_APART: Final = 4


class PlainStep(NamedTuple):
    """One that nobody was to have drafts of: the seconds that it took, those that looking for some took more, and those
    that it waited for its sequences' owners."""

    num_tokens: int
    seconds: float
    looking: float
    waited: float


class SelfDraftingPolicy:
    """Decides, step by step, for all sequences of a worker that drafts for itself.

    Plain steps, chains or trees: what brings most tokens a second goes on, as measured at that load, of greedy
    sequences and of sampled ones apart, and what brings less is tried again now and then, for a hundredth of the time
    at most. While drafting goes on, everything has its price in the tokens that the time would bring otherwise: a
    further step of the drafter must promise more than it takes, and so must each row of verification (of all
    sequences' draft tokens the likeliest, as many as bring most tokens a second: the budget by survival of SmartSpec,
    Liu et al. 2024).
    """

    def __init__(self, costs: StepCosts) -> None:
        """`costs`: of the target's steps, as measured at warm-up."""
        # Whether what is asked and told is of sequences most of which are sampled: these are harder to foresee.
        self.sampled = False
        self._costs = VerifyCosts(costs)
        self._loads: dict[tuple[int, bool], Ways] = {}
        # Of a step of the drafter that computes so many rows, by power of two.
        self._draft_seconds: dict[int, float] = {}
        self._num_measured: Counter[int] = Counter()
        # What it takes to take in a token.
        self._following_seconds = 0.0
        # What the latest sequences wrote, on average.
        self._usual_length = _USUAL_LENGTH
        # Of what its steps promise, as many tokens as those behind which they look, so much is found.
        self._found_share = 1.0

    def way(self, load: int, may_try: bool = True) -> Way:
        """Whether the next step of `load` sequences is to have drafts, and which. Not `may_try`, no drafts are tried
        that seemed to be worse."""
        return self._at(load).choose(may_try)

    def follows(self, load: int) -> bool:
        """Whether drafts are to be expected of such sequences, because they pay or are to be tried."""
        return self._at(load).may_draft()

    def follows_up(self, load: int, num_lacking: int, num_left: int) -> bool:
        """Whether the drafter is to take in so many tokens of one of `load` sequences, which may write so many more:
        that takes less than drafting them may spare. What speaks against it is forgotten bit by bit."""
        spared = self._expected(num_left) * self._costs.seconds(load, 0) / load * _MOST_SPARED
        if num_lacking * self._following_seconds < spared:
            return True
        self._following_seconds *= 1 - _FORGOTTEN_OF_FOLLOWING / load
        return False

    def observe_following(self, load: int, num_tokens: int, num_left: Sequence[int], seconds: float) -> None:
        """The drafter took that long to take in so many tokens that it lacked of some of `load` sequences, which may
        write so many more each. Longer than the target itself would take is no measure of anything."""
        seconds = min(seconds, self._costs.seconds(load, num_tokens))
        before = self._following_seconds
        self._following_seconds += (seconds / num_tokens - before) * (_WEIGHT_OF_FOLLOWING if before else 1.0)
        self._at(load).charge(seconds, math.ceil(sum(map(self._expected, num_left))))

    def observe_ended(self, num_tokens: int) -> None:
        """A sequence that might have drafts has ended, and wrote so many."""
        self._usual_length += _WEIGHT * (num_tokens - self._usual_length)

    def goes_on(self, num_rows: int, load: int, prospect: float) -> bool:
        """Whether a further step of the drafter pays, of so many rows of some of `load` sequences, that finds tokens
        worth so many accepted ones at best. Asked once for each such step: what speaks against it, of what others found
        and took, is forgotten bit by bit."""
        bucket = nearest_power(num_rows)
        if self._num_measured[bucket] < _FIRST_STEPS:
            return True
        cost = self._draft_seconds[bucket] * self._price(load)
        if prospect * self._found_share > cost:
            return True
        if prospect > cost:
            self._found_share += _FORGOTTEN * (1 - self._found_share)
        else:
            self._draft_seconds[bucket] *= 1 - _FORGOTTEN
        return False

    def observe_found(self, prospect: float, found: float) -> None:
        """A step of the drafter of which that was the prospect found what is worth so many more accepted tokens."""
        self._found_share += _WEIGHT * (found / prospect - self._found_share)

    def least_likelihood(self, load: int) -> float:
        """How likely a token must be to be accepted so as to be worth its row."""
        return min(1.0, self._costs.row_seconds(load) * self._price(load))

    def waited(self, load: int, way: Way) -> float:
        """What `load` sequences wait for their owners before such a step, as far as it counts."""
        return min(self._at(load).waited(way), _MOST_WAITED * self._costs.seconds(load, 0))

    def num_rows(self, load: int, likelihoods: Sequence[float], spent: float) -> int:
        """How many draft tokens to verify, of those with these likelihoods, best first, after `spent` seconds of
        waiting and drafting."""
        tokens, best, seconds = float(load), 0, self._costs.of(load)
        most = tokens / (seconds(0) + spent)
        for count, likelihood in enumerate(likelihoods, 1):
            tokens += likelihood
            took = seconds(count) + spent
            if tokens > most * took:
                most, best = tokens / took, count
            elif tokens + likelihood * (len(likelihoods) - count) <= most * took:
                break  # were the others as likely, and their rows free, they would bring less
        return best

    def observe_drafting(self, num_rows: int, seconds: float) -> None:
        """A further step of the drafter, of so many rows, took that long."""
        bucket = nearest_power(num_rows)
        before = self._draft_seconds.get(bucket, seconds)
        self._num_measured[bucket] += 1
        if self._num_measured[bucket] <= _FIRST_STEPS:
            self._draft_seconds[bucket] = min(before, seconds)
        else:
            self._draft_seconds[bucket] = before + _WEIGHT * (min(seconds, _MOST_TIMES * before) - before)

    def step_seconds(self, load: int, num_draft_tokens: int) -> float:
        """What a step of `load` sequences takes that verifies so many draft tokens."""
        return self._costs.seconds(load, num_draft_tokens)

    def observe_step(self, load: int, num_draft_tokens: int, seconds: float) -> None:
        """A step of `load` sequences, without prompts, took that long, and verified so many draft tokens."""
        self._costs.observe(load, num_draft_tokens, seconds)

    def observe_rest(self, load: int, size: int, steps: Sequence[PlainStep]) -> None:
        """Plain steps of `load` sequences, while none of them were to have drafts: see `observe_step`, and with a
        `size` that is not 0 `observe` of as many."""
        num_steps, plain = len(steps), self._costs.seconds(load, 0)
        seconds = sum(min(step.seconds, _MOST_TIMES * plain) for step in steps)
        self._costs.observe(load, 0, seconds / num_steps, math.ceil(num_steps / PLAIN_STEPS_APART))
        if size:
            at, num_tokens = self._at(size), sum(step.num_tokens for step in steps)
            at.wait(sum(min(step.waited, _LONGEST_WAIT * plain) for step in steps) / num_steps, num_steps)
            seconds += sum(min(step.looking, plain) for step in steps)
            waited = num_steps * min(at.waited(Way.PLAIN), _MOST_WAITED * plain)
            at.observe(Way.PLAIN, num_tokens, seconds, waited, load, num_steps)

    def observe(
        self,
        load: int,
        way: Way,
        num_tokens: int,
        seconds: float,
        waited: float = 0.0,
        num_sequences: int | None = None,
    ) -> None:
        """A step of `load` sequences, with those that are to come, brought so many tokens of so many of them (None: of
        all), drafting included in its time. No prompt was in it, and nothing that would have been drafted whatever was
        decided. Before it they `waited` for their owners, who take in a message of several tokens sooner than as many
        messages."""
        at, plain = self._at(load), self._costs.seconds(load, 0)
        at.wait(min(waited, _LONGEST_WAIT * plain))
        before = at.step_seconds(way)
        if seconds > _MOST_TIMES * before:
            seconds = min(seconds, _MOST_TIMES * max(before, plain))
        waited = min(at.waited(way), _MOST_WAITED * plain)
        at.observe(way, num_tokens, seconds, waited, load if num_sequences is None else num_sequences)

    def _expected(self, num_left: int) -> float:
        """How many of so many tokens that a sequence may still write it will, as far as others tell: clients allow for
        more than is written."""
        return min(num_left, self._usual_length)

    def _price(self, load: int) -> float:
        """Tokens that a second is worth."""
        at = self._at(load)
        if at.is_known(Way.PLAIN):
            return at.best_rate()
        return max(at.best_rate(), load / (self._costs.seconds(load, 0) + self.waited(load, Way.PLAIN)))

    def _at(self, load: int) -> Ways:
        kind = nearest_power(load), self.sampled
        found = self._loads.get(kind)
        if found is None:
            found = self._loads[kind] = Ways()
        return found
