"""How often draft tokens are kept, and what that makes a round worth."""

from __future__ import annotations

import math
from collections.abc import Sequence

# Before anything was drafted.
_PRIOR_RATE = 0.7
# A sequence's own rate starts from everybody's, which counts as this many draft tokens.
_PRIOR_TOKENS = 16.0
# And forgets: draft tokens it remembers at most.
_MEMORY_TOKENS = 160.0


class Acceptance:
    """Acceptance rate α: the chance that a draft token is kept, given that those before it were.

    `prior` is whose rate a new sequence starts from; it learns from every observation too.
    """

    def __init__(self, prior: Acceptance | None = None) -> None:
        self._prior = prior
        self._num_examined = 0.0
        self._num_accepted = 0.0

    @property
    def num_examined(self) -> float:
        """Draft tokens that the rate rests on, everybody's included."""
        return self._num_examined if self._prior is None else self._prior.num_examined

    @property
    def rate(self) -> float:
        start = _PRIOR_RATE if self._prior is None else self._prior.rate
        return (self._num_accepted + _PRIOR_TOKENS * start) / (self._num_examined + _PRIOR_TOKENS)

    def rate_at_best(self, confidence: float) -> float:
        """The rate two standard errors up, when only the share `confidence` of what was seen still counts."""
        return min(1.0, self.rate + 1.0 / math.sqrt(confidence * self.num_examined + 4.0))

    def observe(self, num_draft_tokens: int, num_accepted: int) -> None:
        """One round's outcome. Draft tokens behind the first rejected one say nothing."""
        self.observe_each(min(num_accepted + 1, num_draft_tokens), num_accepted)

    def observe_each(self, num_examined: int, num_accepted: int) -> None:
        """So many draft tokens' turn came, and so many were kept, or would have been."""
        self._num_accepted += num_accepted
        self._num_examined += num_examined
        if self._num_examined > _MEMORY_TOKENS:
            scale = _MEMORY_TOKENS / self._num_examined
            self._num_accepted *= scale
            self._num_examined *= scale
        if self._prior is not None:
            self._prior.observe_each(num_examined, num_accepted)


def outcome_of_likeliest(followed_rows: Sequence[int], path: Sequence[int]) -> tuple[int, int]:
    """What would have become of a chain in place of a tree whose nodes of `path` were accepted: how many of its tokens'
    turn would have come, and how many would have been kept.

    Node i follows row `followed_rows[i]` (see `Proposal`); of those that follow the same the first is the likeliest,
    which a chain has. Behind a node that none follows nothing is known.
    """
    likeliest: dict[int, int] = {}
    for node, row in enumerate(followed_rows):
        likeliest.setdefault(row, node)
    rows = [0, *(node + 1 for node in path)]
    num_kept = sum(likeliest[row] == node for row, node in zip(rows, path, strict=False))
    return len(path) + (rows[-1] in likeliest), num_kept


def expected_tokens(acceptance_rate: float, num_draft_tokens: int) -> float:
    """E = (1 - α^(γ+1)) / (1 - α): tokens that a round of γ draft tokens commits on average.

    Leviathan et al. 2023, equation 1.
    """
    if acceptance_rate >= 1.0:
        return num_draft_tokens + 1.0
    return (1.0 - acceptance_rate ** (num_draft_tokens + 1)) / (1.0 - acceptance_rate)
