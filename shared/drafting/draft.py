"""What every source's draft can be asked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from shared.sampling.proposal import Proposal


class Draft(Protocol):
    """`likelihoods`: of each token to be accepted, with all those before it, best first."""

    @property
    def likelihoods(self) -> Sequence[float]: ...

    def proposal(self, count: int) -> Proposal:
        """The first `count` of them, which are verified."""
