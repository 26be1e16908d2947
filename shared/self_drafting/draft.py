"""Draft tokens of one sequence, whoever found them, before it is known how many of them are verified."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from shared.sampling.proposal import Proposal


class Draft(Protocol):
    """`source`: target or suffix. `likelihoods`: of each token to be accepted, with all those before it, best first."""

    @property
    def source(self) -> str: ...

    @property
    def likelihoods(self) -> Sequence[float]: ...

    def proposal(self, count: int) -> Proposal:
        """The first `count` of them, which are verified."""

    def settle(self, proposal: Proposal, committed: Sequence[int]) -> None:
        """What was committed behind the beginning of that proposal."""
