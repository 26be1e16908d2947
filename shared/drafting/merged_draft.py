"""What several sources drafted for one sequence, as one tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shared.drafting.draft import Draft
from shared.sampling.proposal import Proposal


@dataclass(slots=True)
class _Node:
    """`parent`: the node that it follows; None: the last committed token."""

    token_id: int
    parent: _Node | None
    depth: int
    likelihood: float
    source: str


class MergedDraft:
    """All lines of all `drafts`, of a sequence whose own draws verify them. A token that several of them have behind
    the same line is one, as likely as the surest takes it to be, who also counts as its source."""

    def __init__(self, drafts: Sequence[Draft]) -> None:
        nodes: dict[tuple[int, int], _Node] = {}
        for draft in drafts:
            likelihoods, rows = draft.likelihoods, list[_Node | None]([None])
            whole = draft.proposal(len(likelihoods))
            for token, parent_row, source, likelihood in zip(
                whole.token_ids, whole.followed_rows(), whole.sources, likelihoods, strict=True
            ):
                parent = rows[parent_row]
                made = _Node(token, parent, 1 if parent is None else parent.depth + 1, likelihood, source)
                node = nodes.setdefault((id(parent), token), made)
                if likelihood > node.likelihood:
                    node.likelihood, node.source = likelihood, source
                rows.append(node)
        # Who follows another is no likelier, and comes later.
        self._nodes = sorted(nodes.values(), key=lambda node: (-node.likelihood, node.depth))

    @property
    def likelihoods(self) -> Sequence[float]:
        return [node.likelihood for node in self._nodes]

    def proposal(self, count: int) -> Proposal:
        chosen = self._nodes[:count]
        rows = {id(None): 0} | {id(node): row for row, node in enumerate(chosen, 1)}
        return Proposal(
            tuple(node.token_id for node in chosen),
            parents=tuple(rows[id(node.parent)] for node in chosen),
            sources=tuple(node.source for node in chosen),
        ).as_chain()
