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
from shared.policy.calibration import Calibration, observe_proposal
from shared.policy.self_drafting import SelfDraftingPolicy
from shared.policy.step_costs import StepCosts
from shared.sampling.branching import branch
from shared.sampling.draft_tree import WIDTH, DraftTree
from shared.sampling.proposal import EMPTY_PROPOSAL, Proposal
from shared.sampling.rows import SampleRows
from shared.sampling.sampled import SampledTokens
from shared.self_drafting.drafter import Growing, SelfDrafter

logger = logging.getLogger(__name__)

# Tokens of a tree, at most, where nobody says how many.
_MOST_NODES = 16


@dataclass(slots=True)
class _Draft:
    """What was drafted behind so many tokens of a sequence, and how likely the drafter took each token to be."""

    position: int
    proposal: Proposal
    guesses: list[float]


class SelfDrafting:
    """The `Proposer` of what a drafter finds, for sequences that are greedy or seeded and may have it.

    The target's own draws verify it, whatever it is. A drafter that fails is left out from then on; everything else
    goes on without. Belongs to the engine's thread.
    """

    def __init__(
        self,
        drafter: SelfDrafter,
        pool: KVPool,
        policy: SelfDraftingPolicy,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._drafter = drafter
        self._pool = pool
        self._policy = policy
        self._clock = clock
        self._failed = False
        # Of the step that comes or runs.
        self._drafts: dict[Sequence, _Draft] = {}
        self._load = 0
        self._drafted = False
        self._spent = 0.0
        # How often its guesses come true, by depth.
        self._calibrations = [Calibration() for _ in range(drafter.most_steps)]

    @classmethod
    def of(cls, engine: Engine, drafter: SelfDrafter) -> SelfDrafting:
        """For an engine that is warmed up."""
        return cls(drafter, engine.pool, SelfDraftingPolicy(StepCosts(engine.step_costs)))

    @property
    def source(self) -> str:
        return self._drafter.source

    def drafted(self, sequence: Sequence) -> Proposal:
        draft = self._drafts.get(sequence)
        return draft.proposal if draft is not None else EMPTY_PROPOSAL

    def propose(self, scheduler: Scheduler) -> None:
        self._give_up(self._drafts)  # of a step that never took place
        self._drafts, self._load, self._drafted, self._spent = {}, 0, False, 0.0
        decoding = scheduler.decoding()
        if self._failed or not decoding:
            return
        self._load = len(decoding)
        began = self._clock()
        try:
            self._draft(scheduler, [each for each in decoding if self._may_draft(each)])
        except Exception as error:
            self._fail("drafting", error)
            self._give_up(self._drafts)
        self._spent = self._clock() - began

    def planned(self, plan: StepPlan) -> None:
        scheduled = {item.sequence for item in plan.scheduled}
        self._give_up([each for each in self._drafts if each not in scheduled])

    def observe(self, plan: StepPlan, captured: Tensor | None, sampled: List[SampledTokens]) -> None:
        if self._failed:
            return
        try:
            self._drafter.observe(plan, captured, sampled)
        except Exception as error:
            self._fail("what a step computed", error)

    def settle(self, num_tokens: int, seconds: float, has_prompts: bool) -> None:
        for sequence, draft in self._drafts.items():
            self._calibrate(draft, sequence.token_ids[draft.position :])
        if self._load and not has_prompts and not self._failed:
            self._policy.observe(self._load, self._drafted, num_tokens, seconds + self._spent)

    def _give_up(self, sequences: Iterable[Sequence]) -> None:
        for sequence in list(sequences):
            if sequence.proposal is self._drafts.pop(sequence).proposal:
                sequence.proposal = EMPTY_PROPOSAL

    def _may_draft(self, sequence: Sequence) -> bool:
        wanted = sequence.params.self_draft
        return wanted is not None and sequence.params.coupled and self._drafter.ready(sequence)

    def _draft(self, scheduler: Scheduler, sequences: list[Sequence]) -> None:
        """Grows the trees of those for which it pays, and proposes the tokens that do."""
        adaptive = self._policy.drafts(self._load)
        trees: dict[Sequence, DraftTree] = {}
        # Decodes and drafts are one step, which holds so many tokens.
        room = max(0, scheduler.max_batch_tokens - self._load) // max(1, len(sequences))
        for sequence in sequences:
            tree = self._tree(scheduler, sequence, room, adaptive)
            if tree is not None:
                trees[sequence] = tree
        if not trees:
            return
        self._drafted = True
        began = self._clock()
        self._take(trees, self._drafter.begin(list(trees)), [(EMPTY_PROPOSAL, 0)] * len(trees))
        growing = dict(trees)
        while growing:
            now = self._clock()
            self._policy.observe_drafting(len(growing), now - began)
            began = now
            fixed = {each for each in growing if self._is_fixed(each)}
            prospect = sum(tree.prospect for each, tree in growing.items() if each not in fixed)
            if not self._policy.goes_on(len(growing), prospect):
                growing = {each: tree for each, tree in growing.items() if each in fixed}
            advanced = {each: following for each, tree in growing.items() if (following := tree.advance()) is not None}
            growing = {each: trees[each] for each in advanced}
            if growing:
                logits = self._drafter.extend([Growing(each, *following) for each, following in advanced.items()])
                self._take(growing, logits, list(advanced.values()))
        self._propose(trees)

    def _tree(self, scheduler: Scheduler, sequence: Sequence, room: int, adaptive: bool) -> DraftTree | None:
        """An empty one of the shape that the sequence may have; None if it is to have none."""
        wanted = sequence.params.self_draft
        assert wanted is not None
        fixed = wanted.num_draft_tokens
        left = sequence.num_tokens_left - 1  # the last is the target's own
        num_steps = min(self._drafter.most_steps if fixed is None else fixed, self._drafter.most_steps, left)
        num_nodes = min(_MOST_NODES if fixed is None else max(wanted.num_nodes, num_steps), room)
        num_steps = min(num_steps, num_nodes)
        if num_steps <= 0 or (fixed is None and not adaptive):
            return None
        if self._drafter.uses_kv:
            copies = scheduler.reserve(sequence, 1 + WIDTH * (num_steps - 1))
            if copies is None:
                return None
            self._pool.copy_blocks(copies)
        return DraftTree(
            num_nodes,
            num_steps,
            branching=fixed is None or wanted.num_nodes > fixed,
            likelihood=lambda guess, depth: self._calibrations[depth].likelihood(guess),
        )

    def _take(self, trees: dict[Sequence, DraftTree], logits: Tensor, grown: List[tuple[Proposal, int]]) -> None:
        """What may follow the newest tokens of each tree."""
        rows = [
            SampleRows(
                sequence.params,
                sequence.token_ids,
                sequence.num_prompt_tokens,
                proposal,
                sequence.token_counts,
                first_row,
                tree.num_children,
            )
            for (sequence, tree), (proposal, first_row) in zip(trees.items(), grown, strict=True)
        ]
        for tree, children in zip(trees.values(), branch(logits, rows), strict=True):
            tree.take(children)

    def _propose(self, trees: dict[Sequence, DraftTree]) -> None:
        """Of all that was found what pays to be verified, the likeliest."""
        likelihoods = {each: tree.likelihoods() for each, tree in trees.items()}
        adaptive = sorted(
            (its for each, found in likelihoods.items() if not self._is_fixed(each) for its in found), reverse=True
        )
        num_rows = self._policy.num_rows(self._load, adaptive, self._spent)
        least = adaptive[num_rows - 1] if num_rows else float("inf")
        for sequence, tree in trees.items():
            found = likelihoods[sequence]
            count = len(found) if self._is_fixed(sequence) else sum(its >= least for its in found)
            if count:
                sequence.proposal = tree.proposal(count).as_chain()
                self._drafts[sequence] = _Draft(len(sequence.token_ids), sequence.proposal, tree.guesses(count))

    def _is_fixed(self, sequence: Sequence) -> bool:
        wanted = sequence.params.self_draft
        return wanted is not None and wanted.num_draft_tokens is not None

    def _calibrate(self, draft: _Draft, committed: List[int]) -> None:
        proposal = draft.proposal
        depths = proposal.depths

        def observe(i: int, accepted: bool) -> None:
            self._calibrations[depths[i + 1] - 1].observe(draft.guesses[i], accepted)

        observe_proposal(proposal.token_ids, proposal.followed_rows(), committed, observe)

    def _fail(self, at: str, error: Exception) -> None:
        if is_device_error(error):
            raise EngineBroken("the device failed") from error
        self._failed = True
        logger.error("%s is left out from now on: %s failed", self._drafter.source, at, exc_info=error)
