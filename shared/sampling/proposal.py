"""What a drafter proposes: token ids, and for rejection sampling the distributions they came from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Proposal:
    """Draft tokens of one sequence.

    `token_ids`: num_draft_tokens ids. For coupled sampling that is all. For rejection sampling position
    i was drawn from the `candidate_counts[i]` (id, probability) pairs that stand, positions one after
    another, in `candidate_ids` (little-endian uint32) and `candidate_probs` (little-endian float32);
    each position's probabilities sum to 1 and include the drawn token.
    """

    token_ids: tuple[int, ...] = ()
    candidate_counts: tuple[int, ...] = ()
    candidate_ids: bytes = b""
    candidate_probs: bytes = b""

    def __len__(self) -> int:
        return len(self.token_ids)


EMPTY_PROPOSAL = Proposal()
