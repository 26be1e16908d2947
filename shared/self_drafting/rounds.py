"""Rounds that a target makes by itself: what it drafts for the steps that it may take without the router."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as List
from dataclasses import dataclass

from torch import Tensor

from shared.engine.engine import Engine
from shared.engine.failure import EngineBroken, is_device_error
from shared.engine.kv_pool import KVPool
from shared.engine.scheduler import Scheduler, StepPlan
from shared.engine.sequence import Sequence
from shared.policy.self_drafting import SelfDraftingPolicy
from shared.policy.step_costs import StepCosts
from shared.sampling.draft_tree import WIDTH, DraftTree
from shared.sampling.proposal import EMPTY_PROPOSAL, Proposal
from shared.sampling.sampled import SampledTokens
from shared.self_drafting.copies import Copies
from shared.self_drafting.draft import Draft
from shared.self_drafting.drafter import SelfDrafter
from shared.self_drafting.growth import Growth, is_fixed

logger = logging.getLogger(__name__)

# Tokens drafted for a sequence, at most, where nobody says how many.
_MOST_NODES = 16
# What a round of the drafter brought counts so much against those before it.
_WEIGHT = 0.05


@dataclass(slots=True)
class _Round:
    """What of a draft is verified, behind so many tokens of its sequence."""

    draft: Draft
    proposal: Proposal
    position: int


class SelfDrafting:
    """The `Proposer` of copies and of what a drafter finds.

    A sequence has what was copied for it, at once, where more of that may be expected to be accepted than of what the
    drafter usually brings. A drafter is for sequences that are greedy or seeded, whose own draws verify it. A source
    that fails is left out from then on; everything else goes on without. Belongs to the engine's thread.
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
        self._load = 0
        self._grew = False
        self._spent = 0.0
        # Tokens of the drafter's that are accepted in a round.
        self._usual = 0.0

    @classmethod
    def of(cls, engine: Engine, drafter: SelfDrafter | None, copies: Copies | None = None) -> SelfDrafting:
        """For an engine that is warmed up."""
        return cls(drafter, copies, engine.pool, SelfDraftingPolicy(StepCosts(engine.step_costs)))

    @property
    def drafts_with(self) -> str:
        return "" if self._growth is None else self._growth.drafter.source

    def drafted(self, sequence: Sequence) -> Proposal:
        found = self._rounds.get(sequence)
        return found.proposal if found is not None else EMPTY_PROPOSAL

    def source_of(self, sequence: Sequence) -> str:
        found = self._rounds.get(sequence)
        return found.draft.source if found is not None else ""

    def propose(self, scheduler: Scheduler) -> None:
        self._give_up(self._rounds)  # of a step that never took place
        self._rounds, self._load, self._grew, self._spent = {}, 0, False, 0.0
        began = self._clock()
        decoding = scheduler.decoding()
        self._load = len(decoding)
        room = scheduler.draft_room() // max(1, self._load)
        wanting = [each for each in decoding if each.params.self_draft is not None]
        drafts = self._copy(scheduler, wanting, room)
        drafts |= self._grow(scheduler, [each for each in wanting if each not in drafts], room)
        self._spent = self._clock() - began
        self._choose(scheduler, drafts)

    def planned(self, plan: StepPlan | None) -> bool:
        scheduled = set() if plan is None else {item.sequence for item in plan.scheduled}
        left_out = [each for each in self._rounds if each not in scheduled]
        self._give_up(left_out)
        return bool(left_out)

    def observe(self, plan: StepPlan, captured: Tensor | None, sampled: List[SampledTokens]) -> None:
        if self._growth is None:
            return
        try:
            self._growth.drafter.observe(plan, captured, sampled)
        except Exception as error:
            self._drafter_failed(error)

    def settle(self, num_tokens: int, seconds: float, has_prompts: bool) -> None:
        # What fixed shapes and copies bring says nothing of whether drafting pays.
        clean = True
        for sequence, found in self._rounds.items():
            committed = sequence.token_ids[found.position :]
            found.draft.settle(found.proposal, committed)
            clean = clean and found.draft.source == "target" and not is_fixed(sequence)
            if found.draft.source == "target":
                self._usual += _WEIGHT * (found.proposal.num_agreeing(committed) - self._usual)
        if self._growth is not None and self._load and not has_prompts and clean:
            self._policy.observe(self._load, self._grew, num_tokens, seconds + self._spent)

    def _copy(self, scheduler: Scheduler, wanting: List[Sequence], room: int) -> dict[Sequence, Draft]:
        """For whom copies are more than a drafter would bring."""
        if self._copies is None:
            return {}
        found: dict[Sequence, Draft] = {}
        try:
            self._copies.sweep(set(scheduler.sequences()))
            if not wanting:
                return {}
            least = self._policy.least_likelihood(self._load)
            for sequence in wanting:
                if not _may_have(sequence, "suffix"):
                    continue
                fixed = is_fixed(sequence)
                num_steps, num_nodes = _shape(sequence, _MOST_NODES, room)
                if num_steps <= 0:
                    continue
                branching = sequence.params.coupled and (not fixed or num_nodes > num_steps)
                draft = self._copies.draft(sequence, num_steps, num_nodes, 0.0 if fixed else least, branching)
                grows = self._growth is not None and self._may_grow(sequence)
                if draft.copied.num_expected > (self._usual if grows else 0.0):
                    found[sequence] = draft
        except Exception as error:
            self._copies = None
            _report("suffix", error)
            return {}
        return found

    def _grow(self, scheduler: Scheduler, sequences: List[Sequence], room: int) -> dict[Sequence, Draft]:
        """What the drafter finds for those for which it pays."""
        if self._growth is None or not sequences:
            return {}
        adaptive = not all(map(is_fixed, sequences)) and self._policy.drafts(self._load)
        try:
            trees: dict[Sequence, DraftTree] = {}
            for sequence in sequences:
                if (adaptive or is_fixed(sequence)) and self._may_grow(sequence):
                    tree = self._tree(scheduler, sequence, room)
                    if tree is not None:
                        trees[sequence] = tree
            if not trees:
                return {}
            self._grew = True
            return dict(self._growth.grow(trees))
        except Exception as error:
            self._drafter_failed(error)
            return {}

    def _may_grow(self, sequence: Sequence) -> bool:
        assert self._growth is not None
        return sequence.params.coupled and _may_have(sequence, "target") and self._growth.drafter.ready(sequence)

    def _tree(self, scheduler: Scheduler, sequence: Sequence, room: int) -> DraftTree | None:
        """An empty one of the shape that the sequence may have; None if it is to have none."""
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
        return self._growth.tree(num_nodes, num_steps, branching=not is_fixed(sequence) or num_nodes > num_steps)

    def _choose(self, scheduler: Scheduler, drafts: dict[Sequence, Draft]) -> None:
        """Of all that was found what pays to be verified, the likeliest, as far as there are blocks for it."""
        likelihoods = {each: draft.likelihoods for each, draft in drafts.items()}
        adaptive = sorted(
            (its for each, found in likelihoods.items() if not is_fixed(each) for its in found), reverse=True
        )
        num_rows = self._policy.num_rows(self._load, adaptive, self._spent)
        least = adaptive[num_rows - 1] if num_rows else float("inf")
        for sequence, draft in drafts.items():
            found = likelihoods[sequence]
            count = len(found) if is_fixed(sequence) else sum(its >= least for its in found)
            if count == 0:
                continue
            copies = scheduler.reserve(sequence, 1 + count)
            if copies is None:  # what its own blocks hold
                count = min(count, scheduler.num_slots_left(sequence) - 1)
            else:
                self._pool.copy_blocks(copies)
            if count > 0:
                sequence.proposal = draft.proposal(count)
                self._rounds[sequence] = _Round(draft, sequence.proposal, len(sequence.token_ids))

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


def _may_have(sequence: Sequence, source: str) -> bool:
    wanted = sequence.params.self_draft
    return wanted is not None and (not wanted.sources or source in wanted.sources)


def _shape(sequence: Sequence, most_steps: int, room: int) -> tuple[int, int]:
    """Tokens in a line, and in all, that are drafted for it at most."""
    wanted = sequence.params.self_draft
    assert wanted is not None
    left = sequence.num_tokens_left - 1  # the last is the target's own
    fixed = wanted.num_draft_tokens
    num_steps = min(most_steps if fixed is None else fixed, most_steps, left)
    num_nodes = min(_MOST_NODES if fixed is None else max(wanted.num_nodes, num_steps), room)
    return min(num_steps, num_nodes), num_nodes


def _report(source: str, error: Exception) -> None:
    logger.error("%s is left out from now on: it failed", source, exc_info=error)
