"""Which rows of a step's logits belong to which sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shared.sampling.params import SamplingParams
from shared.sampling.proposal import EMPTY_PROPOSAL, Proposal
from shared.sampling.token_counts import TokenCounts


@dataclass(frozen=True, slots=True)
class SampleRows:
    """The rows of one sequence in a step's packed logits `[total_rows, vocab_size]`.

    Sequences follow one another; this one has `num_rows` = 1 + len(proposal) consecutive rows, and row j predicts the
    token at position len(token_ids) + proposal.depths[j], given `token_ids` and the row's lineage in the proposal.
    The first `num_prompt_tokens` of `token_ids` are the prompt, the rest is output. `token_counts` counts
    `token_ids`, for penalties; without it they are counted when needed. Of a tree that a drafter grows there are only
    the rows from `first_row` on, and each is to have the `num_children` likeliest tokens that may follow.
    """

    params: SamplingParams
    token_ids: Sequence[int]
    num_prompt_tokens: int
    proposal: Proposal = EMPTY_PROPOSAL
    token_counts: TokenCounts | None = None
    first_row: int = 0
    num_children: int = 0

    @property
    def num_rows(self) -> int:
        return 1 + len(self.proposal) - self.first_row

    @property
    def depths(self) -> Sequence[int]:
        """Of each row, how many draft tokens come before what it predicts."""
        return self.proposal.depths[self.first_row :]
