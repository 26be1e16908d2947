"""Ways that a target may go with as many such sequences: which brings most, as found by trying the others."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from enum import Enum
from typing import Final

from shared.policy.comparison import Comparison, Side
from shared.policy.goodput import Goodput, Yield
from shared.policy.rest import Rest

# A trial's outcome counts so much against those of the trials before it, or more while these are few.
_TRIAL_WEIGHT: Final = 0.3
# What was not tried yet is tried for so many steps, and so is again what seemed to be worse: for more where they are
# short, until there were so many seconds or steps.
_TRIAL_STEPS: Final = 8
_TRIAL_SECONDS: Final = 0.1
_MOST_TRIAL_STEPS: Final = 32
# It ends as soon as the first so many show that one of both brings less than this share of what the other does, and
# whatever it shows not before so many are measured.
_HOPELESS: Final = 0.6
_MEASURED_STEPS: Final = 3
# If which of both brings more hangs on one step, the next comes at once, whatever it costs, and counts so many times as
# much: while these were few, and each counts for much. Later that would not do: what a way takes now and then would be
# forgotten as soon as it is seen.
_TIMES_IN_DOUBT: Final = 4
_FEW_TRIALS: Final = 3
# In turns with what is gone, of so many steps each at least, and so many times as long as it takes to settle, plain
# ones or others: plain steps are alike, what drafts bring is a matter of luck. What the first takes, and others that
# begin before it has settled, does not count, but what such steps take: what those of the other way brought is being
# taken in meanwhile, and less is found in the caches. Where steps take a millisecond a plain one behind a round takes
# 1.6 times as long as others, and the next two 1.25 times.
_TURN: Final = 3
_TURN_OF_PLAIN: Final = 2
_TURN_OF_DRAFTS: Final = 4
_SETTLING_SECONDS: Final = 0.006
# But for no more than so many times as many that are begun: others' prompts may be in each, or there is nobody to try
# it with, and a step behind such a one does not count either. It goes on where it ended when its time comes again.
_MOST_BEGUN: Final = 8
# That costs this share of the time at most, each way, half of it once two in a row were in vain, a third behind three,
# and so on down to a quarter; and comes no more often than each so many times its length.
_TRIAL_SHARE: Final = 0.01
_MOST_IN_VAIN: Final = 4
_LEAST_TRIALS_APART: Final = 5.0
# One way gives way to another only if that brings so many times as much; one that does so in a trial, for all that is
# known from others, is tried again soon.
_KEEP: Final = 1.02
_SURPRISE: Final = 1.15
# Drafts take so much more of their steps' time than these show: who takes in what they bring has the same cores.
_UNSEEN: Final = 0.01
# A new wait counts so much against those before it.
_WEIGHT_OF_WAIT: Final = 0.03
# Of waits behind two ways their ratio is remembered, as far as they are longer than so much of a step.
_HARDLY_WAITED: Final = 0.1


class Way(Enum):
    """How a step is made: plain, or with drafts of its own."""

    PLAIN = "plain"
    CHAIN = "chain"
    TREE = "tree"

    # Each is there once; Enum's own is Python, and steps may take as little as a millisecond.
    __hash__ = object.__hash__

    @property
    def drafts(self) -> bool:
        return self is not Way.PLAIN


class _Known:
    """Of one way: what it brought, and when it is tried again while another is gone."""

    def __init__(self) -> None:
        self.goodput = Goodput()
        # Its latest trial, and whether it ended before enough was seen.
        self.compared = Comparison()
        self.is_unfinished = False
        # Whether the latest that it was in ended without telling which brings more.
        self.is_in_doubt = False
        # Of tokens a second, over those of the others: a logarithm.
        self.log_rate = 0.0
        # What is waited on average before the step behind one.
        self.waited: float | None = None
        # Trials in a row that changed nothing.
        self.num_in_vain = 0
        # The next begins after so many seconds of steps; so long after the last it was to come, and for so long it may
        # have to wait for sequences to try it with.
        self.next_trial = 0.0
        self.apart = 0.0
        self.patience = 0.0

    @property
    def trial_share(self) -> float:
        return _TRIAL_SHARE / min(max(self.num_in_vain, 1), _MOST_IN_VAIN)


class Ways:
    """The one that is gone, and what is known of the others."""

    def __init__(self) -> None:
        self.way = Way.TREE
        # Of a trial of another, which goes on in turns with it: how many steps that began, what those of both took,
        # whether it is its turn, of how many steps of the turn, and of how long ones, it is known what they brought,
        # and whether some count.
        self._tried: Way | None = None
        self._num_begun, self._trial_seconds = 0, 0.0
        self._is_its_turn = False
        self._turn_steps, self._turn_seconds, self._is_turn_measured = 0, 0.0, False
        # Whether the latest step is between those of a turn and of neither, as there was nobody to try the other with.
        self._is_between = False
        # The latest decision but for such steps, whether the latest step is of it and still to be told of, for how long
        # it has been the same, and whether there was such a step just before.
        self._chosen: Way | None = None
        self._is_open = False
        self._settled = 0.0
        self._is_behind_other = False
        self._trial_steps = _TRIAL_STEPS  # of the latest
        self._known = {way: _Known() for way in Way}
        self._rest = Rest()
        # Of one sequence, the way that is gone.
        self._brought = Yield()
        # Of the latest step.
        self._latest: Way | None = None
        # How many times as much as that the best way brings.
        self._best_times = 1.0
        # How often two were compared, behind a trial that was in doubt so many times at once.
        self._num_compared: Counter[frozenset[Way]] = Counter()
        # Of all steps; from when on one is to be tried, and one that drafts, if none is gone or tried.
        self._seconds = self._due_at = self._drafts_at = 0.0
        # Spent since the last trial so that drafts could be tried.
        self._following = 0.0
        # For so many tokens that are still to come, of which each pays its share.
        self._owed = 0.0
        self._num_owing = 0

    def choose(self, may_try: bool) -> Way:
        """For the step that comes. Not `may_try`, no drafts are tried."""
        way = self._choose(may_try)
        if self._tried is not None and self._is_its_turn and way is not self._tried:  # nobody to try it with
            self._is_open, self._is_between = False, True
            return way
        self._is_behind_other, self._is_between = self._is_between, False
        before, self._chosen = self._chosen, way
        if way is not before:
            self._settled = 0.0
        elif self._is_open:  # nobody told of the step before: most such have prompts, which take as long as to settle
            self._settled = max(self._settled, _SETTLING_SECONDS)
            self._turn_seconds = max(self._turn_seconds, self._turn_length)
        self._is_open = True
        return way

    def _choose(self, may_try: bool) -> Way:
        if self._tried is not None:
            is_long = self._turn_steps >= _TURN and self._turn_seconds >= self._turn_length
            if is_long and (self._is_turn_measured or not self._is_its_turn):
                self._begin_turn(not self._is_its_turn)
            if not self._is_its_turn:
                return self.way
            self._num_begun += 1
            if self._num_begun > _MOST_BEGUN * self._trial_steps:
                self._known[self._tried].is_unfinished = True
                self._postpone([self._tried], self._trial_seconds)
            elif self._tried.drafts and not may_try:
                return self.way
        elif self._seconds >= self._due_at and self._now.num_seen >= _TRIAL_STEPS:
            due = sorted(self._due(), key=self.times, reverse=True)
            possible = [way for way in due if may_try or not way.drafts]
            if possible:
                self._begin_trial(possible[0])
            elif any(self._seconds > self._known[way].next_trial + self._known[way].patience for way in due):
                self._postpone(due, 0.0)  # together: who they are tried with is kept up with meanwhile
        return self._tried or self.way

    def may_draft(self) -> bool:
        """Whether drafts pay, or are tried or to be tried."""
        return self._seconds >= self._drafts_at

    def times(self, way: Way) -> float:
        """How many times as much that way brings as the one that is gone. What they brought other than in turns
        says nothing: a machine is faster or slower from one minute to the next, and texts are others."""
        return math.exp(self._known[way].log_rate - self._known[self.way].log_rate)

    def is_known(self, way: Way) -> bool:
        return self._known[way].goodput.num_seen > 0

    def best_rate(self) -> float:
        """Tokens a second, the best way's; 0 as long as that is not known."""
        if self.is_known(self.way):
            return self._now.rate * self._best_times
        return max(known.goodput.rate for known in self._known.values())

    def step_seconds(self, way: Way) -> float:
        """What its latest steps took, but those that settled; 0 as long as that is not known."""
        return self._known[way].goodput.step_seconds

    def waited(self, way: Way) -> float:
        """What is waited behind such a step on average; as long as it is not known of that way, as behind others."""
        waited = self._known[way].waited
        if waited is None:
            waits = [self._known[each].waited for each in (self.way, *Way)]
            waited = next((each for each in waits if each is not None), 0.0)
        return waited

    def wait(self, seconds: float, num_steps: int = 1) -> None:
        """So long a step's sequences waited for their owners, who take in what the one before brought; or so many
        steps' did on average."""
        if self._latest is None:
            return
        before, weight = self.waited(self._latest), 1 - (1 - _WEIGHT_OF_WAIT) ** num_steps
        after = self._known[self._latest].waited = before + weight * (seconds - before)
        if self._latest is not self.way:
            return
        # Owners have changed, or have more to do: what was waited behind the others changes as much.
        hardly = _HARDLY_WAITED * self._now.step_seconds
        for way, known in self._known.items():
            if way is not self.way and known.waited is not None and before + hardly > 0:
                known.waited = max(0.0, (known.waited + hardly) * (after + hardly) / (before + hardly) - hardly)

    def charge(self, seconds: float, num_left: int) -> None:
        """So much time was spent so that sequences may have drafts, of which so many tokens are still to come."""
        self._seconds += seconds
        self._owed += seconds
        self._num_owing += num_left
        if not self.way.drafts:
            self._following += seconds

    def observe(
        self, way: Way, num_tokens: int, seconds: float, waited: float, num_sequences: int = 1, num_steps: int = 1
    ) -> None:
        """A step brought so many tokens, of so many sequences, and what is waited on average behind such a step. Or so
        many did, and all of them waited so long, while nothing was tried."""
        is_chosen = self._is_open and way is self._chosen
        settles = is_chosen and (self._settled < _SETTLING_SECONDS or self._is_behind_other)
        self._latest = way
        if is_chosen:
            self._turn_steps += 1
            self._turn_seconds += seconds
            self._trial_seconds += seconds
            self._settled += seconds
            self._is_turn_measured |= not settles
        self._is_open = False
        if way is self.way is Way.PLAIN and self._tried is None and not self.may_draft():
            self._rest.observe(seconds, waited, num_steps)
        self._seconds += seconds
        # While drafts are only tried theirs is the share of the tokens that they bring, and not of all.
        share = self._pay(num_tokens) if way.drafts or not self.way.drafts else 0.0
        tried = None if self._tried is None else self._known[self._tried]
        unseen = _UNSEEN * seconds if way.drafts else 0.0
        if way.drafts:
            waited += share
        if tried is None or not settles:
            self._known[way].goodput.observe(num_tokens, seconds, waited + unseen, num_steps)
        if way is self.way:
            self._brought.observe(num_tokens / num_sequences, num_steps)
        if tried is None or not is_chosen:
            return
        side = tried.compared.gone if way is self.way else tried.compared.tried
        side.observe(num_tokens / num_sequences, None if settles else seconds + unseen, waited)
        if self._is_enough(tried.compared):
            self._conclude()

    @property
    def _now(self) -> Goodput:
        return self._known[self.way].goodput

    @property
    def _turn_length(self) -> float:
        """In seconds, at least."""
        way = self._tried if self._tried is not None and self._is_its_turn else self.way
        return (_TURN_OF_DRAFTS if way.drafts else _TURN_OF_PLAIN) * _SETTLING_SECONDS

    @property
    def _enough_steps(self) -> int:
        """Of a trial, and of what it is to be compared with."""
        step_seconds = max(self._now.step_seconds, _TRIAL_SECONDS / _MOST_TRIAL_STEPS)
        return max(_TRIAL_STEPS, int(_TRIAL_SECONDS / step_seconds))

    def _is_enough(self, compared: Comparison) -> bool:
        if compared.num_steps < _TRIAL_STEPS or compared.num_measured < _MEASURED_STEPS:
            return False
        return compared.num_steps >= self._trial_steps or compared.is_certain(_HOPELESS)

    def _due(self) -> list[Way]:
        return [way for way in Way if way is not self.way and self._seconds >= self._known[way].next_trial]

    def _pay(self, num_tokens: int) -> float:
        """What so many tokens owe for what was spent before."""
        share = self._owed * min(1.0, num_tokens / self._num_owing) if self._num_owing else 0.0
        self._owed -= share
        self._num_owing = max(0, self._num_owing - num_tokens)
        return share

    def _begin_trial(self, way: Way) -> None:
        known = self._known[way]
        self._trial_steps = self._enough_steps
        self._tried, self._num_begun, self._trial_seconds = way, 0, 0.0
        self._begin_turn(True)
        if not known.is_unfinished:
            known.goodput, known.compared = Goodput(), Comparison()
        known.is_unfinished = False
        self._note_due()

    def _begin_turn(self, is_its_turn: bool) -> None:
        """Of the way that is tried, or of what is gone."""
        self._is_its_turn, self._is_turn_measured = is_its_turn, False
        self._turn_steps, self._turn_seconds = 0, 0.0

    def _conclude(self) -> None:
        """The trial has ended: takes the better way, and says when the other is tried again."""
        tried = self._tried
        assert tried is not None
        found, before = self._learn(tried), self.way
        compared = self._known[tried].compared
        self._known[tried].num_in_vain += 1
        self._known[tried].is_in_doubt = False
        if self.times(tried) > _KEEP:
            self._brought = Yield()
            self._brought.observe(compared.tried.num_tokens, compared.tried.num_steps)
            if before is Way.PLAIN:
                self._rest.end()
            self._known[before].num_in_vain = self._known[tried].num_in_vain = 0
            self.way = tried
            for known in self._known.values():
                known.is_unfinished = False
        self._tried = None
        self._best_times = max(map(self.times, Way))
        other = tried if self.way is before else before
        known = self._known[other]
        lost = max(0.0, 1 - self.times(other))
        few = self._num_compared[frozenset((tried, before))] <= _FEW_TRIALS
        known.is_in_doubt = few and not compared.is_certain(1.0)
        if self.way is before and found > _SURPRISE:  # for all that was believed: soon again
            lost, known.num_in_vain = 0.0, 0
        trial = self._trial_steps * max(self.step_seconds(before), self.step_seconds(tried))
        known.patience = trial * _LEAST_TRIALS_APART
        apart = max((trial * lost + self._following) / known.trial_share, known.patience)
        known.apart = 0.0 if known.is_in_doubt else apart
        known.next_trial, self._following = self._seconds + known.apart, 0.0
        self._note_due()

    def _learn(self, tried: Way) -> float:
        """How many times as much it brought in its trial."""
        its = self._known[tried]
        compared = its.compared
        if min(compared.tried.rate, compared.gone.rate) <= 0:
            return 0.0
        if self.way is Way.PLAIN:
            self._rest.compare(compared.gone.seconds_apart)
        took = self._alone(tried, compared.tried) / self._alone(self.way, compared.gone)
        # What drafts bring is luck, and of what is gone there were more steps than those of the trial.
        ratio = compared.tried.tokens_each / self._brought.mean / took
        pair, num = frozenset((tried, self.way)), _TIMES_IN_DOUBT if its.is_in_doubt else 1
        self._num_compared[pair] += num
        weight = max(_TRIAL_WEIGHT, num / self._num_compared[pair])
        its.log_rate += weight * math.log(ratio / self.times(tried))
        return compared.tried.tokens_each / compared.gone.tokens_each / took

    def _alone(self, way: Way, side: Side) -> float:
        """Seconds that such a step takes if none of another way are between."""
        return side.seconds_apart / (1.0 if way.drafts else self._rest.times)

    def _postpone(self, ways: Iterable[Way], seconds: float) -> None:
        """It came to nothing, of so many seconds: there was nothing to be seen, or nobody to try it with."""
        self._tried = None
        seconds = max(seconds, self._trial_steps * self._now.step_seconds)
        for known in map(self._known.__getitem__, ways):
            known.patience = max(known.patience, seconds * _LEAST_TRIALS_APART)
            known.next_trial = self._seconds + max(known.apart, known.patience, self._following / known.trial_share)
        self._following = 0.0
        self._note_due()

    def _note_due(self) -> None:
        others = [way for way in Way if way is not self.way]
        self._due_at = min(self._known[way].next_trial for way in others)
        drafts = self.way.drafts or (self._tried is not None and self._tried.drafts)
        self._drafts_at = 0.0 if drafts else min(self._known[way].next_trial for way in others if way.drafts)
