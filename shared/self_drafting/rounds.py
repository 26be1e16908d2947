"""Rounds that a target makes by itself: what it drafts for the steps that it may take without the router."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable
from collections.abc import Sequence as List
from dataclasses import dataclass

from torch import Tensor

from shared.drafting.copied_draft import CopiedDraft
from shared.drafting.draft import Draft
from shared.drafting.merged_draft import MergedDraft
from shared.drafting.tree_draft import TreeDraft
from shared.engine.engine import Engine
from shared.engine.failure import EngineBroken, is_device_error
from shared.engine.kv_pool import KVPool
from shared.engine.scheduler import Scheduler
from shared.engine.sequence import Sequence
from shared.engine.step_plan import StepPlan
from shared.policy.self_drafting import PLAIN_STEPS_APART, PlainStep, SelfDraftingPolicy
from shared.policy.step_costs import StepCosts
from shared.policy.ways import Way
from shared.sampling.draft_tree import WIDTH, DraftTree
from shared.sampling.proposal import EMPTY_PROPOSAL, Proposal
from shared.sampling.sampled import SampledTokens
from shared.self_drafting.copies import Copies
from shared.self_drafting.crowd import Crowd, is_free, may_have
from shared.self_drafting.drafter import SelfDrafter
from shared.self_drafting.growth import Growth, is_fixed

logger = logging.getLogger(__name__)

# Tokens drafted for a sequence, at most, where nobody says how many.
_MOST_NODES = 16
# What a round of the drafter brought counts so much against those before it.
_WEIGHT = 0.05
# Where no drafts are to be expected so many plain steps are told of together: of a step of a millisecond, what takes
# 40 µs each time are percents, which whoever may draft would pay for nothing.
_TOLD_TOGETHER = 32
# Looking for copies costs so many times what it takes: the step behind it finds less in the caches. Of a step of 0.9 ms
# 0.07 were the look, and 0.1 what it was longer by.
_TIMES_LOOKED = 1.5


@dataclass(slots=True)
class _Round:
    """What is verified of what was drafted behind so many tokens of its sequence."""

    proposal: Proposal
    position: int


class SelfDrafting:
    """The `Proposer` of copies and of what a drafter finds.

    A sequence has what was copied for it alone where more of that may be expected to be accepted than of what the
    drafter usually brings, and else the likeliest of both. The target's own draws verify all of it, those that a
    drafter is to foresee by noise of the sequence's own where it has no seed. A source that fails is left out from then
    on; everything else goes on without. Belongs to the engine's thread.
    """

    def __init__(
        self,
        drafter: SelfDrafter | None,
        copies: Copies | None,
        pool: KVPool,
        policy: SelfDraftingPolicy,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._growth = None if drafter is None else Growth(drafter, policy, clock)
        self._copies = copies
        self._pool = pool
        self._policy = policy
        self._clock = clock
        # Of the step that comes or runs.
        self._rounds: dict[Sequence, _Round] = {}
        # Verified or not, and behind so many tokens.
        self._grown: dict[Sequence, tuple[TreeDraft, int]] = {}
        self._load = 0
        # Who is there, and how many of them may have of a drafter what pays.
        self._crowd = Crowd.of([], [])
        self._num_free = 0
        self._free: set[Sequence] = set()
        # Of whom drafts of the drafter's are to be expected, and what they have of it in this step.
        self._expected: List[Sequence] = []
        self._way = Way.PLAIN
        # Whether it matters what was decided: not where copies leave the drafter nobody to draft for.
        self._matters = True
        # In seconds, choosing included; that alone; and what plain steps take as well: for what copying finds.
        self._spent = self._chose = self._copying = 0.0
        # What of a step only drafts need: where none are had it is not plain decoding's.
        self._observed = 0.0
        # How long that step's sequences were waiting for their owners alone: who took part in the one before, when that
        # ended, and if it had no prompts.
        self._waited = 0.0
        self._ended = 0.0
        self._had_prompts = True
        # Of whom plain steps say nothing to the drafter, as nobody is followed.
        self._unheeded: frozenset[Sequence] = frozenset()
        self._num_plain = 0
        # A plain step behind one that verified takes so many seconds more than others: it finds less in the caches.
        self._behind = 0.0
        # Plain steps of this crowd of which nobody was told: see `SelfDraftingPolicy.observe_rest`.
        self._untold: list[PlainStep] = []
        # Tokens of the drafter's that are accepted in a round.
        self._usual = 0.0

    @classmethod
    def of(cls, engine: Engine, drafter: SelfDrafter | None, copies: Copies | None = None) -> SelfDrafting:
        """For an engine that is warmed up."""
        return cls(drafter, copies, engine.pool, SelfDraftingPolicy(StepCosts(engine.step_costs)), engine.clock)

    @property
    def drafts_with(self) -> str:
        return "" if self._growth is None else self._growth.drafter.source

    def drafted(self, sequence: Sequence) -> Proposal:
        found = self._rounds.get(sequence)
        return found.proposal if found is not None else EMPTY_PROPOSAL

    def propose(self, scheduler: Scheduler) -> None:
        if self._rounds:
            self._give_up(self._rounds)  # of a step that never took place
        self._rounds, self._grown = {}, {}
        self._load, self._num_free, self._way, self._spent, self._expected = 0, 0, Way.PLAIN, 0.0, []
        self._matters, self._observed, self._copying = True, 0.0, 0.0
        self._look_around(scheduler)
        crowd = self._crowd
        if not crowd.wanting:  # what is done for others says nothing of who drafts
            return
        self._load = len(crowd.decoding)
        self._num_free = len(crowd.free)
        drafting = self._who_may_draft()
        self._expected = drafting
        if drafting:  # before it is decided how the step is made
            self._tell()
            self._unheeded = frozenset()
        copying = self._who_may_copy()
        if not drafting and not copying:
            return
        self._follow(drafting)
        began = self._clock()
        room = scheduler.draft_room() // self._load
        least = self._policy.least_likelihood(self._load)
        copied = self._copy(copying, room, least)
        self._copying = self._clock() - began
        growing = self._who_may_grow(drafting)
        num_growing = sum(map(is_free, growing))
        # What is tried with fewer says little.
        if num_growing > 0:
            self._way = self._policy.way(crowd.size, 2 * num_growing >= self._num_free)
        lacking = [each for each in growing if each not in copied or copied[each].num_expected <= self._usual]
        self._matters = bool(lacking) or not growing
        grown = self._grow(scheduler, [each for each in lacking if self._way.drafts or is_fixed(each)], room, least)
        self._grown = {each: (tree, len(each.token_ids)) for each, tree in grown.items()}
        self._spent = self._clock() - began
        self._choose(scheduler, copied, grown, room)
        self._chose = self._clock() - began - self._spent
        self._spent += self._chose
        if copied:
            self._copying += self._chose

    def _look_around(self, scheduler: Scheduler) -> None:
        """Who is there."""
        before, decoding, coming = self._crowd, scheduler.decoding(), scheduler.coming()
        changed = decoding != before.decoding or coming != before.coming
        went_on = not self._had_prompts and (not changed or set(before.decoding).issuperset(decoding))
        self._waited = self._clock() - self._ended if went_on else 0.0
        if changed:
            self._tell()
            self._crowd, self._unheeded = Crowd.of(decoding, coming), frozenset()
            if (sampled := self._crowd.sampled) is not None:
                self._policy.sampled = sampled
        if changed or len(self._free) != len(before.free):
            self._tell_of_ended(scheduler)
        self._sweep(scheduler.sequences() if changed else None)

    def planned(self, plan: StepPlan | None) -> bool:
        if not self._rounds:
            return False
        scheduled = set() if plan is None else {item.sequence for item in plan.scheduled}
        left_out = [each for each in self._rounds if each not in scheduled]
        self._give_up(left_out)
        return bool(left_out)

    def observe(self, plan: StepPlan, captured: Tensor | None, sampled: List[SampledTokens]) -> None:
        if self._growth is None:
            return
        unheeded = self._unheeded
        if all(item.num_tokens == 1 and item.sequence in unheeded for item in plan.scheduled):
            return
        began = self._clock()
        followed = self._followed(plan)
        try:
            drafter = self._growth.drafter
            drafter.observe(plan, captured, sampled, followed)
            sequences = [item.sequence for item in plan.scheduled]
            rest = not followed and not any(map(drafter.keeps_up, sequences))
            self._unheeded = frozenset(sequences) if rest else frozenset()
        except Exception as error:
            self._drafter_failed(error)
        self._observed += self._clock() - began

    def _followed(self, plan: StepPlan) -> set[Sequence]:
        """With whom of that step a drafter is to keep up: with those that are to have drafts of it, and with those that
        begin where drafts are to be expected of as many."""
        scheduled = [item.sequence for item in plan.scheduled]
        followed = set(self._expected).intersection(scheduled)
        expected = self._policy.follows(max(len(scheduled), self._crowd.size))
        followed.update(each for each in scheduled if (expected or is_fixed(each)) and may_have(each, "target"))
        return followed

    def settle(self, num_tokens: int, seconds: float, has_prompts: bool) -> None:
        for sequence, (tree, position) in self._grown.items():
            accepted = tree.settle(sequence.token_ids[position:])
            if (verified := self._rounds.get(sequence)) is not None:
                its = sum(place < len(verified.proposal) for place in accepted)
                self._usual += _WEIGHT * (its - self._usual)
        self._ended, self._had_prompts = self._clock(), has_prompts
        if not self._load or has_prompts:
            return
        if self._copies is not None:
            self._copies.settle(self._worth)
        # Of plain steps a few say it all.
        self._num_plain = 0 if self._rounds else self._num_plain + 1
        if self._num_plain == 1:
            plain = self._policy.step_seconds(self._load, 0)
            self._behind += _WEIGHT * (min(seconds, 2 * plain) - plain - self._behind)
        if self._num_plain and not self._expected:
            self._untold.append(PlainStep(num_tokens, seconds, self._spent - self._observed, self._waited))
            if len(self._untold) == _TOLD_TOGETHER:
                self._tell()
            return
        if self._num_plain % PLAIN_STEPS_APART == 0:
            self._policy.observe_step(self._load, sum(len(each.proposal) for each in self._rounds.values()), seconds)
        if self._growth is None or not self._num_free or not self._matters:
            return
        num_sequences = self._load
        for sequence, found in self._rounds.items():
            if is_fixed(sequence):  # which says nothing of whether drafting pays
                num_tokens -= len(sequence.token_ids) - found.position
                num_sequences -= 1
        # By the load for which it was decided.
        seconds += self._spent if self._way.drafts else self._copying - self._observed
        self._tell()
        self._policy.observe(self._crowd.size, self._way, num_tokens, seconds, self._waited, num_sequences)

    def _tell(self) -> None:
        """Of the plain steps that this crowd made while no drafts were to be expected."""
        if not self._untold:
            return
        size = self._crowd.size if self._growth is not None and self._crowd.free else 0
        self._policy.observe_rest(len(self._crowd.decoding), size, self._untold)
        self._untold.clear()

    def _tell_of_ended(self, scheduler: Scheduler) -> None:
        if gone := self._free.difference(self._crowd.wanting):
            gone.difference_update(paused := gone.intersection(scheduler.sequences()))
            for each in gone:
                self._policy.observe_ended(len(each.token_ids) - each.num_prompt_tokens)
            self._free = paused
        self._free.update(self._crowd.free)

    def _who_may_draft(self) -> List[Sequence]:
        """Of whom drafts of the drafter's are to be expected."""
        crowd = self._crowd
        if self._growth is None or not crowd.drafting:
            return []
        return crowd.drafting if self._policy.follows(crowd.size) else crowd.fixed

    def _follow(self, sequences: List[Sequence]) -> None:
        """Has the drafter take in what it lacks of those that are to have drafts of it."""
        if self._growth is None or not sequences:
            return
        drafter, policy, began = self._growth.drafter, self._policy, self._clock()
        try:
            lacking = {each: num for each in sequences if (num := drafter.num_lacking(each))}
            followed = [
                each
                for each, num in lacking.items()
                if is_fixed(each) or policy.follows_up(self._crowd.size, num, each.num_tokens_left)
            ]
            if not followed:
                return
            drafter.follow(followed)
            num_taken_in = sum(lacking[each] - drafter.num_lacking(each) for each in followed)
            num_left = [each.num_tokens_left for each in followed]
        except Exception as error:
            self._drafter_failed(error)
            return
        if num_taken_in and any(not is_fixed(each) for each in followed):
            policy.observe_following(self._crowd.size, num_taken_in, num_left, self._clock() - began)

    def _worth(self, sequence: Sequence, looking: float) -> tuple[float, float]:
        """What copying spared and spent it, in its plain steps, of which one takes its share of the step: of what
        verifying takes longer, and what comes behind it, as much as its tokens are of all."""
        plain = self._policy.step_seconds(self._load, 0)
        found, share = self._rounds.get(sequence), plain / self._load
        looking *= _TIMES_LOOKED
        if found is None:
            return 0.0, looking / share
        sources = found.proposal.sources
        path = found.proposal.path(sequence.token_ids[found.position :])
        num_verified = sum(len(each.proposal) for each in self._rounds.values())
        verifying = self._policy.step_seconds(self._load, num_verified) - plain + self._chose + max(0.0, self._behind)
        spent = looking + verifying * sources.count("suffix") / num_verified
        return sum(sources[i] == "suffix" for i in path), spent / share

    def _sweep(self, running: Iterable[Sequence] | None) -> None:
        if self._copies is None:
            return
        try:
            self._copies.sweep(running)
        except Exception as error:
            self._copies = None
            _report("suffix", error)

    def _who_may_copy(self) -> List[Sequence]:
        """For whom it is looked."""
        if self._copies is None:
            return []
        rests = self._copies.rests
        try:
            return [each for each in self._crowd.copying if is_fixed(each) or not rests(each)]
        except Exception as error:
            self._copies = None
            _report("suffix", error)
            return []

    def _copy(self, sequences: List[Sequence], room: int, least: float) -> dict[Sequence, CopiedDraft]:
        """For whom of them there is something that is `least` likely to be accepted, where that is not fixed."""
        if self._copies is None or not sequences:
            return {}
        found: dict[Sequence, CopiedDraft] = {}
        try:
            for sequence in sequences:
                fixed = is_fixed(sequence)
                num_steps, num_nodes = _shape(sequence, _MOST_NODES, room)
                if num_steps <= 0:
                    continue
                branching = not fixed or num_nodes > num_steps
                draft = self._copies.draft(sequence, num_steps, num_nodes, 0.0 if fixed else least, branching, fixed)
                if draft.likelihoods:
                    found[sequence] = draft
        except Exception as error:
            self._copies = None
            _report("suffix", error)
            return {}
        return found

    def _grow(
        self, scheduler: Scheduler, sequences: List[Sequence], room: int, price: float
    ) -> dict[Sequence, TreeDraft]:
        """What the drafter finds for them. `price`: see `Growth`."""
        if self._growth is None:
            return {}
        try:
            trees: dict[Sequence, DraftTree] = {}
            for sequence in sequences:
                tree = self._tree(scheduler, sequence, room, None if is_fixed(sequence) else price)
                if tree is not None:
                    trees[sequence] = tree
            return self._growth.grow(trees, self._load) if trees else {}
        except Exception as error:
            self._drafter_failed(error)
            return {}

    def _who_may_grow(self, sequences: List[Sequence]) -> List[Sequence]:
        """Of those of whom drafts are to be expected, who is ready for them."""
        if self._growth is None:
            return []
        try:
            return [each for each in sequences if self._growth.drafter.ready(each)]
        except Exception as error:
            self._drafter_failed(error)
            return []

    def _tree(self, scheduler: Scheduler, sequence: Sequence, room: int, price: float | None) -> DraftTree | None:
        """An empty one of the shape that the sequence may have; None if it is to have none. `price`: see `Growth`."""
        assert self._growth is not None
        drafter = self._growth.drafter
        num_steps, num_nodes = _shape(sequence, drafter.most_steps, room)
        if num_steps <= 0:
            return None
        if drafter.uses_kv:
            copies = scheduler.reserve(sequence, 1 + WIDTH * (num_steps - 1))
            if copies is None:
                return None
            self._pool.copy_blocks(copies)
        branching = num_nodes > num_steps if is_fixed(sequence) else self._way is Way.TREE
        return self._growth.tree(sequence, num_nodes, num_steps, branching, price)

    def _choose(
        self, scheduler: Scheduler, copied: dict[Sequence, CopiedDraft], grown: dict[Sequence, TreeDraft], room: int
    ) -> None:
        """Of all that was found what pays to be verified, the likeliest, as far as there are blocks for it; at most
        `room` for each."""
        drafts: dict[Sequence, Draft] = {**copied, **grown}
        if not drafts:
            return
        drafts |= {
            each: MergedDraft([grown[each], copied[each]]) for each in grown if each in copied and not _is_chain(each)
        }
        likelihoods = {each: draft.likelihoods for each, draft in drafts.items()}
        adaptive = sorted(
            ((its, each) for each, found in likelihoods.items() if not is_fixed(each) for its in found),
            key=lambda pair: -pair[0],
        )
        spent = self._spent + self._policy.waited(self._crowd.size, self._way)
        num_rows = self._policy.num_rows(self._load, [its for its, _ in adaptive], spent)
        # Who follows another is no likelier, and so comes later: of each the first so many.
        counts = Counter(each for _, each in adaptive[:num_rows])
        for sequence, draft in drafts.items():
            fixed = _most_fixed(sequence)
            count = min(counts[sequence] if fixed is None else min(len(likelihoods[sequence]), fixed), room)
            if count == 0:
                if self._copies is not None and sequence in copied:
                    self._copies.pass_over(sequence)
                continue
            copies = scheduler.reserve(sequence, 1 + count)
            if copies is None:  # what its own blocks hold
                count = min(count, scheduler.num_slots_left(sequence) - 1)
            else:
                self._pool.copy_blocks(copies)
            if count > 0:
                sequence.proposal = draft.proposal(count)
                self._rounds[sequence] = _Round(sequence.proposal, len(sequence.token_ids))

    def _give_up(self, sequences: Iterable[Sequence]) -> None:
        for sequence in list(sequences):
            if sequence.proposal is self._rounds.pop(sequence).proposal:
                sequence.proposal = EMPTY_PROPOSAL

    def _drafter_failed(self, error: Exception) -> None:
        """Raises EngineBroken after an accelerator's own error."""
        if is_device_error(error):
            raise EngineBroken("the device failed") from error
        assert self._growth is not None
        _report(self._growth.drafter.source, error)
        self._growth = None


def _shape(sequence: Sequence, most_steps: int, room: int) -> tuple[int, int]:
    """Tokens in a line, and in all, that are drafted for it at most."""
    wanted = sequence.params.self_draft
    assert wanted is not None
    left = sequence.num_tokens_left - 1  # the last is the target's own
    fixed = wanted.num_draft_tokens
    num_steps = min(most_steps if fixed is None else fixed, most_steps, left)
    num_nodes = min(_MOST_NODES if fixed is None else max(wanted.num_nodes, num_steps), room)
    return min(num_steps, num_nodes), num_nodes


def _most_fixed(sequence: Sequence) -> int | None:
    """How many draft tokens it has at most where that is said; None: what pays."""
    wanted = sequence.params.self_draft
    if wanted is None or wanted.num_draft_tokens is None:
        return None
    return max(wanted.num_nodes, wanted.num_draft_tokens)


def _is_chain(sequence: Sequence) -> bool:
    """Whether it is said that what it has is one line."""
    wanted = sequence.params.self_draft
    return wanted is not None and wanted.num_draft_tokens is not None and wanted.num_nodes <= wanted.num_draft_tokens


def _report(source: str, error: Exception) -> None:
    logger.error("%s is left out from now on: it failed", source, exc_info=error)
