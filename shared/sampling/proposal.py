"""What a drafter proposes: token ids, and for rejection sampling the distributions they came from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shared.sampling.sampled import Candidates


@dataclass(frozen=True, slots=True)
class Proposal:
    """Draft tokens of one sequence.

    `token_ids`: num_draft_tokens ids. Where the target's own draws verify them that is all. For rejection sampling
    position i was drawn from the `candidate_counts[i]` (id, probability) pairs that stand, positions one after
    another, in `candidate_ids` (little-endian uint32) and `candidate_probs` (little-endian float32);
    each position's probabilities sum to 1 and include the drawn token.

    A sequence that is verified has a row of logits for its last committed token, row 0, and one for each draft token:
    row i + 1 is that of token i. In a token tree token i follows that of row `parents[i]`, which is i at most; without
    `parents` each follows the one before. `sources`: who drafted each token, model, suffix or target; may be left out.
    """

    token_ids: tuple[int, ...] = ()
    candidate_counts: tuple[int, ...] = ()
    candidate_ids: bytes = b""
    candidate_probs: bytes = b""
    parents: tuple[int, ...] = ()
    sources: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def depths(self) -> Sequence[int]:
        """Of each row, how many draft tokens come before what it predicts: 0 for row 0."""
        return depths_of(self.parents) if self.parents else range(len(self.token_ids) + 1)

    def followed_rows(self) -> Sequence[int]:
        """Of each token the row that it follows, in chains as well."""
        return self.parents or range(len(self.token_ids))

    def drawn_from(self, candidates: Sequence[Candidates]) -> Proposal:
        """The same with the distribution that each token was drawn from."""
        return replace(
            self,
            candidate_counts=tuple(entry.num_entries for entry in candidates),
            candidate_ids=b"".join(entry.ids for entry in candidates),
            candidate_probs=b"".join(entry.probs for entry in candidates),
        )

    def as_chain(self) -> Proposal:
        """The same without `parents`, if each follows the one before."""
        return replace(self, parents=()) if self.parents == tuple(range(len(self.parents))) else self

    def lineage(self, row: int) -> list[int]:
        """The draft tokens up to and including that of this row, first to last; none for row 0."""
        if not self.parents:
            return list(range(row))
        line = []
        while row > 0:
            line.append(row - 1)
            row = self.parents[row - 1]
        return line[::-1]

    def path(self, token_ids: Sequence[int]) -> list[int]:
        """Which of the draft tokens are these, from the first on, one behind the other."""
        parents = self.followed_rows()
        rows: dict[tuple[int, int], int] = {}
        for i, following in enumerate(zip(parents, self.token_ids, strict=True), 1):
            rows.setdefault(following, i)  # of two alike the first, as in verification
        found: list[int] = []
        row = 0
        for token in token_ids:
            next_row = rows.get((row, token))
            if next_row is None:
                break
            row = next_row
            found.append(row - 1)
        return found

    def num_agreeing(self, token_ids: Sequence[int]) -> int:
        """How many of these tokens, from the first on, were proposed one behind the other."""
        return len(self.path(token_ids))

    def following(self, path: Sequence[int]) -> list[int]:
        """Which draft tokens were to come behind these: of a chain all others, of a tree those that might have been the
        next."""
        if not self.parents:
            return list(range(len(path), len(self.token_ids)))
        row = path[-1] + 1 if path else 0
        return [i for i, parent in enumerate(self.parents) if parent == row]


EMPTY_PROPOSAL = Proposal()


def depths_of(parents: Sequence[int]) -> list[int]:
    """Of each row of a tree how far it is from row 0."""
    depths = [0]
    for parent in parents:
        depths.append(depths[parent] + 1)
    return depths
