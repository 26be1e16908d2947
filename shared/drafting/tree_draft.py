"""A tree that a model or a head has grown, as a draft."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shared.policy.calibration import Calibration, observe_proposal
from shared.sampling.draft_tree import DraftTree
from shared.sampling.proposal import Proposal


@dataclass(frozen=True, slots=True)
class TreeDraft:
    """A tree that has grown; how often guesses like its own come true, the `calibrations` learn by depth (the last one
    of all that is deeper). `source`: model or target."""

    tree: DraftTree
    calibrations: Sequence[Calibration]
    source: str

    @property
    def likelihoods(self) -> Sequence[float]:
        return self.tree.likelihoods()

    def proposal(self, count: int) -> Proposal:
        proposal = self.tree.proposal(count).as_chain()
        return replace(proposal, sources=(self.source,) * len(proposal))

    def settle(self, proposal: Proposal, committed: Sequence[int]) -> None:
        guesses, depths = self.tree.guesses(len(proposal)), proposal.depths

        def observe(i: int, accepted: bool) -> None:
            self.calibrations[min(depths[i + 1], len(self.calibrations)) - 1].observe(guesses[i], accepted)

        observe_proposal(proposal.token_ids, proposal.followed_rows(), committed, observe)
