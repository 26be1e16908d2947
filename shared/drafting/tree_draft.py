"""A tree that a model or a head has grown, as a draft."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shared.policy.calibration import observe_proposal
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

    def settle(self, proposal: Proposal, committed: Sequence[int]) -> None:
        guesses, followed = self.tree.guesses(len(proposal)), proposal.followed_rows()

        def observe(i: int, accepted: bool) -> None:
            # Who likes another better proposes that before it.
            self.foresight.observe(guesses[i], followed.index(followed[i]) == i, accepted)

        observe_proposal(proposal.token_ids, followed, committed, observe)
