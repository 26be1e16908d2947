"""What was copied for a sequence, as a draft."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shared.copying.copied import Copied
from shared.sampling.proposal import Proposal


@dataclass(frozen=True, slots=True)
class CopiedDraft:
    """What was copied for a sequence, whose manuscript learns of all of it with the tokens that follow."""

    copied: Copied

    @property
    def likelihoods(self) -> Sequence[float]:
        return self.copied.likelihoods

    @property
    def num_expected(self) -> float:
        """How many of its tokens may be expected to be accepted."""
        return self.copied.num_expected

    def proposal(self, count: int) -> Proposal:
        return self.copied.first(count).proposal
