"""Trees of many sequences, grown together by one drafter, a step at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, MutableMapping
from collections.abc import Sequence as List
from weakref import WeakKeyDictionary

from torch import Tensor

from shared.drafting.tree_draft import TreeDraft
from shared.engine.sequence import Sequence
from shared.policy.foresight import Foresight
from shared.policy.self_drafting import SelfDraftingPolicy
from shared.sampling.branching import branch
from shared.sampling.draft_tree import DraftTree
from shared.sampling.proposal import EMPTY_PROPOSAL, Proposal
from shared.sampling.rows import SampleRows
from shared.self_drafting.drafter import Growing, SelfDrafter


class Growth:
    """Grows trees as long as that is worth its time to all sequences that may have what pays; others have a fixed
    shape."""

    def __init__(
        self, drafter: SelfDrafter, policy: SelfDraftingPolicy, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.drafter = drafter
        self._policy = policy
        self._clock = clock
        # Everybody's, and each sequence's own.
        self._foresight = Foresight()
        self._foresights: MutableMapping[Sequence, Foresight] = WeakKeyDictionary()

    def tree(
        self, sequence: Sequence, num_nodes: int, num_steps: int, branching: bool, price: float | None
    ) -> DraftTree:
        """An empty one of that sequence. `price`: of a token's row, in accepted ones; None: whatever that is. Nobody
        looks behind tokens that are accepted less often than they cost, or than once in `num_nodes` times: what would
        be found there is hardly worth its row, let alone a step."""
        least = 0.0 if price is None else max(price, 1 / num_nodes)
        return DraftTree(
            num_nodes,
            num_steps,
            branching=branching,
            least=least,
            price=price or 0.0,
            likelihood=self._foresight_of(sequence).likelihood,
        )

    def grow(self, trees: dict[Sequence, DraftTree], load: int) -> dict[Sequence, TreeDraft]:
        """Grows these, which are empty, of `load` sequences in the step."""
        self._take(trees, self.drafter.begin(list(trees)), [(EMPTY_PROPOSAL, 0)] * len(trees))
        growing, free = trees, [tree for each, tree in trees.items() if not is_fixed(each)]
        while growing := {each: tree for each, tree in growing.items() if tree.num_wanted > 0}:
            free = [tree for tree in free if tree.num_wanted > 0]
            prospect, num_free = sum(tree.prospect for tree in free), sum(tree.num_wanted for tree in free)
            if free and not self._policy.goes_on(num_free, load, prospect):
                growing, free = {each: tree for each, tree in growing.items() if is_fixed(each)}, []
                continue
            began, before = self._clock(), sum(tree.worth for tree in free)
            num_rows = sum(tree.num_wanted for tree in growing.values())
            advanced = {each: following for each, tree in growing.items() if (following := tree.advance()) is not None}
            logits = self.drafter.extend([Growing(each, *following) for each, following in advanced.items()])
            self._take(growing, logits, list(advanced.values()))
            self._policy.observe_drafting(num_rows, self._clock() - began)
            if prospect > 0:
                self._policy.observe_found(prospect, sum(tree.worth for tree in free) - before)
        return {each: TreeDraft(tree, self._foresight_of(each), "target") for each, tree in trees.items()}

    def _foresight_of(self, sequence: Sequence) -> Foresight:
        found = self._foresights.get(sequence)
        if found is None:
            found = self._foresights[sequence] = Foresight(self._foresight)
        return found

    def _take(self, trees: dict[Sequence, DraftTree], logits: Tensor, grown: List[tuple[Proposal, int]]) -> None:
        """What may follow the newest tokens of each tree."""
        for sequence, (proposal, first_row) in zip(trees, grown, strict=True):
            sequence.foresee(1 + max(proposal.depths[first_row:]))
        rows = [
            SampleRows(
                sequence.drawn_by,
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


def is_fixed(sequence: Sequence) -> bool:
    """Whether it is said how many tokens are drafted for it, whatever pays."""
    wanted = sequence.params.self_draft
    return wanted is not None and wanted.num_draft_tokens is not None
