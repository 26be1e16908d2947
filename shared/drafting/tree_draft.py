"""A tree that a model or a head has grown, as a draft."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shared.policy.foresight import Foresight
from shared.sampling.draft_tree import DraftTree
from shared.sampling.proposal import Proposal


@dataclass(frozen=True, slots=True)
class TreeDraft:
    """A tree that has grown, of which `foresight` learns how often guesses like its own come true. `source`: model or
    target."""

    tree: DraftTree
    foresight: Foresight
    source: str

    @property
    def likelihoods(self) -> Sequence[float]:
        return self.tree.likelihoods()

    def proposal(self, count: int) -> Proposal:
        proposal = self.tree.proposal(count).as_chain()
        return replace(proposal, sources=(self.source,) * len(proposal))

    def settle(self, committed: Sequence[int]) -> list[int]:
        """What was committed behind its beginning. Of all it has: what is not verified because little is thought of it
        would never be thought better of. Returns the places of those accepted, among all to propose."""
        outcomes = self.tree.outcomes(committed)
        for outcome in outcomes:
            self.foresight.observe(outcome.guess, outcome.is_first, outcome.accepted)
        return [outcome.place for outcome in outcomes if outcome.accepted]
