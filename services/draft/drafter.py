"""One sequence on the draft worker: committed tokens, draws behind them, and the proposal asked for."""

from __future__ import annotations

import time
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field

from shared.drafting.copied_draft import CopiedDraft
from shared.drafting.merged_draft import MergedDraft
from shared.drafting.tree_draft import TreeDraft
from shared.engine.sequence import Sequence
from shared.policy.acceptance import Acceptance, expected_tokens, outcome_of_likeliest
from shared.policy.foresight import Foresight
from shared.sampling.draft_tree import DraftTree
from shared.sampling.proposal import EMPTY_PROPOSAL, Proposal
from shared.sampling.sampled import Candidates, SampledTokens


@dataclass(eq=False)
class Drafter:
    """Drafts behind the committed tokens of `sequence`.

    `candidates` runs parallel to the sequence's draws. `num_asked` is how many draft tokens the router
    waits for, 0 when it waits for none. Asked for a tree it has no draws, but the sequence's tree, which can be
    answered with once it has grown, and what was `copied` for it meanwhile. `acceptance` is that of what
    it drafts itself, learnt from what is committed behind `answered`, the latest; `foresight`, of its trees, learns
    with it.
    """

    sequence: Sequence
    foresight: Foresight
    candidates: list[Candidates | None] = field(default_factory=list)
    num_asked: int = 0
    asked_ns: int = 0
    num_nodes: int = 0
    copied: CopiedDraft | None = None
    acceptance: Acceptance = field(default_factory=Acceptance)
    answered: Proposal = EMPTY_PROPOSAL

    def commit(self, base_length: int, token_ids: Tokens[int]) -> None:
        """Takes note of committed tokens; draws that continue them survive, and of a tree the KV of what agrees."""
        if self.answered:
            path = self.answered.path(token_ids)
            self.acceptance.observe_each(*outcome_of_likeliest(self.answered.followed_rows(), path))
            if self.sequence.tree is not None:
                self._own_draft(self.sequence.tree).settle(token_ids)
            self.answered = EMPTY_PROPOSAL
        self.sequence.commit(base_length, token_ids)
        self.candidates = self.candidates[len(self.candidates) - self.sequence.num_drawn :]
        self.num_asked = 0

    def prefill(self) -> None:
        """Computes the KV of what is committed, short of the last token, which the first draw needs.

        Draws that survive have theirs, and may yet be no more.
        """
        self.sequence.num_steps = 0
        self.sequence.num_wanted_tokens = self.sequence.num_committed - 1

    def rest(self) -> None:
        """Draws no further, not even on a guess, until it is asked again."""
        self.sequence.num_steps = 0

    def ask(self, num_draft_tokens: int) -> None:
        """Wants a proposal; what was drawn beforehand counts."""
        self.num_asked = num_draft_tokens
        self.asked_ns = time.time_ns()
        self.sequence.num_steps = max(0, num_draft_tokens - self.sequence.num_drawn)
        self.sequence.draws_on = True

    def ask_for_tree(self, num_draft_tokens: int, num_nodes: int, copied: CopiedDraft | None = None) -> None:
        """Wants a tree of that many tokens, found in `num_draft_tokens` steps or `copied`; what was drawn beforehand is
        dropped."""
        self.sequence.drop_draws()
        self.candidates = []
        self.num_asked = num_draft_tokens
        self.asked_ns = time.time_ns()
        self.num_nodes, self.copied = num_nodes, copied
        self.sequence.grow(DraftTree(num_nodes, num_draft_tokens, likelihood=self.foresight.likelihood))

    def take(self, sampled: SampledTokens) -> None:
        """Takes in what one step sampled: a draw of the sequence's; trees grow by themselves."""
        if self.sequence.tree is None:
            self.candidates.append(sampled.candidates)

    @property
    def answerable(self) -> bool:
        if self.sequence.tree is not None:
            return self.num_asked > 0 and self.sequence.num_steps == 0
        return 0 < self.num_asked <= self.sequence.num_drawn

    def answer(self) -> Proposal:
        """The proposal asked for."""
        start, count = self.sequence.num_committed, self.num_asked
        self.num_asked = 0
        if self.sequence.tree is not None:
            own = self._own_draft(self.sequence.tree)
            self.answered = own.proposal(len(own.likelihoods))
            if self.copied is None or not self.copied.likelihoods:
                return self.answered
            return MergedDraft([own, self.copied]).proposal(self.num_nodes)
        self.answered = Proposal(tuple(self.sequence.token_ids[start : start + count]), sources=("model",) * count)
        return self.answered.drawn_from([each for each in self.candidates[:count] if each is not None])

    def num_expected(self, num_draft_tokens: int) -> float:
        """How many of so many draft tokens may be expected to be accepted."""
        return expected_tokens(self.acceptance.rate, num_draft_tokens) - 1

    def guess_on(self, num_draft_tokens: int) -> None:
        """Continues on the guess that the whole answer is accepted: its bonus token, then the next draft."""
        self.sequence.num_steps = num_draft_tokens + 1
        # What is committed meanwhile may end it.
        self.sequence.draws_on = False

    def _own_draft(self, tree: DraftTree) -> TreeDraft:
        return TreeDraft(tree, self.foresight, "model")
