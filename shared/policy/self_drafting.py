"""Whether a target drafts for itself, how far, and how many of the tokens it verifies: by measured goodput."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

from shared.policy.overhead import nearest_power
from shared.policy.step_costs import StepCosts
from shared.policy.verify_costs import VerifyCosts

# Of what steps brought so much is remembered, in steps.
_MEMORY_STEPS: Final = 50.0
# And a trial's outcome counts so much against those of the trials before it, or more while these are few.
_TRIAL_WEIGHT: Final = 0.3
# What was not tried yet is tried for so many steps, and so is again what seemed to be worse: for more where they are
# short, until there were so many seconds or steps.
_TRIAL_STEPS: Final = 8
_TRIAL_SECONDS: Final = 0.1
_MOST_TRIAL_STEPS: Final = 32
# But for no more than so many times as many that are begun: others' prompts may be in each.
_MOST_BEGUN: Final = 8
# That costs this share of the time at most, half of it once two in a row were in vain, a third behind three, and so on
# down to a quarter; and comes no more often than each so many times its length.
_TRIAL_SHARE: Final = 0.01
_MOST_IN_VAIN: Final = 4
_LEAST_TRIALS_APART: Final = 20.0
# One way gives way to the other only if that brings so many times as much.
_KEEP: Final = 1.02
# A step counts for no more than so many times those before it, or what a plain one should take: a machine that stands
# still for a moment says nothing.
_MOST_TIMES: Final = 4.0
# A new measurement of what drafting takes counts so much against those before it, and of what taking in does, which
# is rarely to be had.
_WEIGHT: Final = 0.1
_WEIGHT_OF_FOLLOWING: Final = 0.3
# A wait is believed to be no longer than so many plain steps, and counts so much against those before it; what a step
# waits on average counts as no more than so many: somebody who reads slowly must not decide for whoever comes next.
_LONGEST_WAIT: Final = 64.0
_WEIGHT_OF_WAIT: Final = 0.03
_MOST_WAITED: Final = 4.0
# What share of plain steps drafting spares at best, but for rare texts.
_MOST_SPARED: Final = 0.5
# So much of what nobody looks for any more, as too little of it was found, is thought to be there after all, each time.
_FORGOTTEN: Final = 0.002
# And so much of what taking in seems to cost, each time that this speaks against it.
_FORGOTTEN_OF_FOLLOWING: Final = 0.0005


class _Goodput:
    """Tokens a second, by the latest steps and what they waited."""

    def __init__(self) -> None:
        self.num_seen = 0
        self.num_steps = 0.0
        self._tokens = 0.0
        self._seconds = 0.0
        self._waited = 0.0

    @property
    def rate(self) -> float:
        return self._tokens / (self._seconds + self._waited) if self._seconds > 0 else 0.0

    @property
    def step_seconds(self) -> float:
        return self._seconds / self.num_steps if self.num_steps else 0.0

    def observe(self, num_tokens: int, seconds: float, waited: float) -> None:
        keep = 1 - 1 / _MEMORY_STEPS
        self.num_seen += 1
        self.num_steps = self.num_steps * keep + 1
        self._tokens = self._tokens * keep + num_tokens
        self._seconds = self._seconds * keep + seconds
        self._waited = self._waited * keep + waited


class _Load:
    """What is known of steps among about so many sequences, with and without drafts, and what is going on."""

    def __init__(self) -> None:
        self.drafting, self.plain = _Goodput(), _Goodput()
        self.drafts = True
        # What a step's sequences wait for their owners on average, with and without drafts.
        self._waited: dict[bool, float] = {}
        # How many times as many tokens a second drafting brings as plain steps: of the way that was tried, in its
        # trial, and of the other one in the steps before. What they brought at other times says nothing beside it:
        # a machine is faster or slower from one minute to the next, and texts are others.
        self._log_gain = 0.0
        self._num_learnt = 0
        # Spent since the last trial so that drafts could be tried.
        self.following = 0.0
        # Or while they pay, for so many tokens that are still to come, of which each pays its share.
        self._owed = 0.0
        self._num_owing = 0
        # Of a trial of the other way so many steps are still to be seen, and so many may be begun for that.
        self.num_left = 0
        self.num_begun = 0
        self.trial_steps = _TRIAL_STEPS  # of the latest
        # Trials in a row that changed nothing.
        self.num_in_vain = 0
        # The next begins after so many seconds of steps at this load, of which there were so many; so long after the
        # last it was to come, and for so long it may have to wait for sequences to try it with.
        self.next_trial = 0.0
        self.seconds = 0.0
        self.apart = 0.0
        self.patience = 0.0

    @property
    def is_due(self) -> bool:
        return self.seconds >= self.next_trial

    @property
    def enough_steps(self) -> int:
        """Of a trial, and of what it is to be compared with."""
        step_seconds = max(self.of(self.drafts).step_seconds, _TRIAL_SECONDS / _MOST_TRIAL_STEPS)
        return max(_TRIAL_STEPS, int(_TRIAL_SECONDS / step_seconds))

    @property
    def trial_share(self) -> float:
        return _TRIAL_SHARE / min(max(self.num_in_vain, 1), _MOST_IN_VAIN)

    def charge(self, seconds: float, num_left: int) -> None:
        """So much time was spent on sequences of which so many tokens are still to come."""
        self._owed += seconds
        self._num_owing += num_left

    def pay(self, num_tokens: int) -> float:
        """What so many tokens owe for what was spent before."""
        share = self._owed * min(1.0, num_tokens / self._num_owing) if self._num_owing else 0.0
        self._owed -= share
        self._num_owing = max(0, self._num_owing - num_tokens)
        return share

    def of(self, drafts: bool) -> _Goodput:
        return self.drafting if drafts else self.plain

    def waited(self, drafts: bool) -> float:
        """As long as one way is unknown, as the other."""
        return self._waited.get(drafts, self._waited.get(not drafts, 0.0))

    def wait(self, drafts: bool, seconds: float) -> None:
        before = self.waited(drafts)
        self._waited[drafts] = before + _WEIGHT_OF_WAIT * (seconds - before)

    def begin_trial(self) -> None:
        self.trial_steps = self.enough_steps
        self.num_left, self.num_begun = self.trial_steps, 0
        if self.drafts:
            self.plain = _Goodput()
        else:
            self.drafting = _Goodput()

    def learn(self) -> None:
        """A trial has ended."""
        if self.drafting.rate > 0 and self.plain.rate > 0:
            found = math.log(self.drafting.rate / self.plain.rate)
            self._num_learnt += 1
            self._log_gain += max(_TRIAL_WEIGHT, 1 / self._num_learnt) * (found - self._log_gain)

    def times(self, drafts: bool) -> float:
        """How many times as much as the other way that way brings."""
        return math.exp(self._log_gain * (1 if drafts else -1))


class SelfDraftingPolicy:
    """Decides, step by step, for all sequences of a worker that drafts for itself.

    Drafting goes on while it brings more tokens a second than plain steps do, both as measured at that load, and what
    brings less is tried again now and then, for a hundredth of the time at most. While it goes on, everything has its
    price in the tokens that the time would bring otherwise: a further step of the drafter must promise more than it
    takes, and so must each row of verification (of all sequences' draft tokens the likeliest, as many as bring most
    tokens a second: the budget by survival of SmartSpec, Liu et al. 2024).
    """

    def __init__(self, costs: StepCosts) -> None:
        """`costs`: of the target's steps, as measured at warm-up."""
        self._costs = VerifyCosts(costs)
        self._loads: dict[int, _Load] = {}
        # Of a step of the drafter among that many sequences, by power of two.
        self._draft_seconds: dict[int, float] = {}
        # What it takes to take in a token.
        self._following_seconds = 0.0
        # Of what its steps promise, as many tokens as those behind which they look, so much is found.
        self._found_share = 1.0

    def drafts(self, load: int, may_try: bool = True) -> bool:
        """Whether the next step of `load` sequences is to have drafts. Not `may_try`, drafts are not tried
        that seemed to be worse."""
        at = self._at(load)
        if at.num_left > 0:
            at.num_begun += 1
            if at.num_begun > _MOST_BEGUN * at.trial_steps:
                self._postpone(at)
        elif at.is_due and at.of(at.drafts).num_seen >= at.enough_steps:
            if at.drafts or may_try:
                at.begin_trial()
            elif at.seconds > at.next_trial + at.patience:
                self._postpone(at)
        return at.drafts if at.num_left == 0 else not at.drafts

    def follows(self, load: int) -> bool:
        """Whether drafts are to be expected of such sequences, because they pay or are to be tried."""
        at = self._at(load)
        return at.drafts or at.num_left > 0 or at.is_due

    def follows_up(self, load: int, num_lacking: int, num_left: int) -> bool:
        """Whether the drafter is to take in so many tokens of one of `load` sequences, of which so many are still to
        come: that takes less than drafting them may spare. What speaks against it is forgotten bit by bit."""
        spared = num_left * self._costs.seconds(load, 0) / load * _MOST_SPARED
        if num_lacking * self._following_seconds < spared:
            return True
        self._following_seconds *= 1 - _FORGOTTEN_OF_FOLLOWING / load
        return False

    def observe_following(self, load: int, num_tokens: int, num_left: int, seconds: float) -> None:
        """The drafter took that long to take in so many tokens that it lacked of some of `load` sequences, of which so
        many are still to come in all. Longer than the target itself would take is no measure of anything."""
        at = self._at(load)
        seconds = min(seconds, self._costs.seconds(load, num_tokens))
        before = self._following_seconds
        self._following_seconds += (seconds / num_tokens - before) * (_WEIGHT_OF_FOLLOWING if before else 1.0)
        at.seconds += seconds
        if at.drafts:
            at.charge(seconds, num_left)
        else:
            at.following += seconds

    def goes_on(self, num_growing: int, load: int, prospect: float) -> bool:
        """Whether a further step of the drafter for so many of `load` sequences pays, that finds tokens behind others
        which are accepted so often, all sequences' together. Asked once for each such step: where what others found
        alone speaks against it, that is forgotten bit by bit."""
        seconds = self._draft_seconds.get(nearest_power(num_growing))
        if seconds is None:
            return True
        cost = seconds * self._price(load)
        if prospect * self._found_share > cost:
            return True
        if prospect > cost:
            self._found_share += _FORGOTTEN * (1 - self._found_share)
        return False

    def observe_found(self, prospect: float, found: float) -> None:
        """By a step of the drafter of which that was the prospect so many more tokens are expected to be accepted."""
        self._found_share += _WEIGHT * (found / prospect - self._found_share)

    def least_likelihood(self, load: int) -> float:
        """How likely a token must be to be accepted so as to be worth its row."""
        return min(1.0, self._costs.row_seconds(load) * self._price(load))

    def waited(self, load: int) -> float:
        """What `load` sequences wait for their owners before a step with drafts, as far as it counts."""
        return min(self._at(load).waited(True), _MOST_WAITED * self._costs.seconds(load, 0))

    def num_rows(self, load: int, likelihoods: Iterable[float], spent: float) -> int:
        """How many draft tokens to verify, of those with these likelihoods, best first, after `spent` seconds of
        waiting and drafting."""
        tokens, best, count = float(load), 0, 0
        most = tokens / (self._costs.seconds(load, 0) + spent)
        for count, likelihood in enumerate(likelihoods, 1):
            tokens += likelihood
            rate = tokens / (self._costs.seconds(load, count) + spent)
            if rate > most:
                most, best = rate, count
        return best

    def observe_drafting(self, load: int, seconds: float) -> None:
        """A step of the drafter for so many sequences took that long."""
        bucket = nearest_power(load)
        before = self._draft_seconds.get(bucket, seconds)
        self._draft_seconds[bucket] = before + _WEIGHT * (min(seconds, 4 * before) - before)

    def step_seconds(self, load: int, num_draft_tokens: int) -> float:
        """What a step of `load` sequences takes that verifies so many draft tokens."""
        return self._costs.seconds(load, num_draft_tokens)

    def observe_step(self, load: int, num_draft_tokens: int, seconds: float) -> None:
        """A step of `load` sequences, without prompts, took that long, and verified so many draft tokens."""
        self._costs.observe(load, num_draft_tokens, seconds)

    def observe(self, load: int, drafted: bool, num_tokens: int, seconds: float, waited: float = 0.0) -> None:
        """A step of `load` sequences brought so many tokens, drafting included in its time. No prompt was in it, and
        nothing that would have been drafted whatever was decided. Before it they `waited` for their owners, who
        take in a message of several tokens sooner than as many messages."""
        at, plain = self._at(load), self._costs.seconds(load, 0)
        at.wait(drafted, min(waited, _LONGEST_WAIT * plain))
        waited = min(at.waited(drafted), _MOST_WAITED * plain)
        if seconds > _MOST_TIMES * at.of(drafted).step_seconds:
            seconds = min(seconds, _MOST_TIMES * max(at.of(drafted).step_seconds, plain))
        at.seconds += seconds
        at.of(drafted).observe(num_tokens, seconds + (at.pay(num_tokens) if drafted else 0.0), waited)
        if at.num_left > 0 and drafted != at.drafts:
            at.num_left -= 1
            if at.num_left == 0:
                self._conclude(at)

    def _conclude(self, at: _Load) -> None:
        """A trial of the other way has ended: takes the better one, and says when the other is tried again."""
        at.learn()
        at.num_in_vain += 1
        if at.times(not at.drafts) > _KEEP:
            at.drafts, at.num_in_vain = not at.drafts, 0
        lost = max(0.0, 1 - at.times(not at.drafts))
        trial = at.trial_steps * max(at.drafting.step_seconds, at.plain.step_seconds)
        at.patience = trial * _LEAST_TRIALS_APART
        at.apart = max((trial * lost + at.following) / at.trial_share, at.patience)
        at.next_trial, at.following = at.seconds + at.apart, 0.0

    def _postpone(self, at: _Load) -> None:
        """It came to nothing: there was nothing to be seen, or nobody to try it with."""
        at.num_left = 0
        at.patience = max(at.patience, at.trial_steps * at.of(at.drafts).step_seconds * _LEAST_TRIALS_APART)
        at.next_trial = at.seconds + max(at.apart, at.patience, at.following / at.trial_share)
        at.following = 0.0

    def _price(self, load: int) -> float:
        """Tokens that a second is worth."""
        at = self._at(load)
        now, other = at.of(at.drafts), at.of(not at.drafts)
        rate = now.rate * max(1.0, at.times(not at.drafts)) if now.num_steps else other.rate
        return max(rate, load / self._costs.seconds(load, 0) if not at.plain.num_steps else 0.0)

    def _at(self, load: int) -> _Load:
        bucket = nearest_power(load)
        found = self._loads.get(bucket)
        if found is None:
            found = self._loads[bucket] = _Load()
        return found
