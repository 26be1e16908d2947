"""One sequence's token tree as it grows: best first, by how likely its lines are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from shared.sampling.proposal import Proposal
from shared.sampling.sampled import Child

# Tokens that a step computes of one tree: on a CPU so many rows cost hardly more than one.
WIDTH = 8


class _Node(NamedTuple):
    """`parent`: index of the node that it follows, -1 where that is the last committed token. `logprob`: of all of its
    line, from there on."""

    token_id: int
    parent: int
    logprob: float


class DraftTree:
    """The `num_nodes` likeliest tokens that `num_steps` steps of the drafter find, each behind one that is there, too.

    A step computes the likeliest that were not yet, of those that would be proposed by now, so that the tree is as
    deep as its likely lines are, and growing ends where nothing better can come (as in EAGLE-2, Li et al. 2024, but
    that its steps look at the last level alone).
    """

    def __init__(self, num_nodes: int, num_steps: int) -> None:
        self._num_nodes = num_nodes
        self._num_steps = num_steps
        self._nodes: list[_Node] = []
        # Those computed, in that order, and how many of them by the latest step; by the first one it was the root.
        self._computed: list[int] = []
        self._num_latest = 0

    @property
    def num_children(self) -> int:
        """How many tokens that may follow a row are worth to know."""
        return min(self._num_nodes, WIDTH)

    def take(self, children: Sequence[Sequence[Child]]) -> None:
        """Takes in what may follow each row that the latest step computed."""
        latest = self._computed[-self._num_latest :] if self._num_latest else [-1]
        for parent, found in zip(latest, children, strict=True):
            before = self._nodes[parent].logprob if parent >= 0 else 0.0
            self._nodes += [_Node(child.token_id, parent, before + child.logprob) for child in found]
        self._num_steps -= 1

    def advance(self) -> tuple[Proposal, int] | None:
        """What the next step computes: all tokens computed so far and behind them its own, and the first row of these;
        None if the tree has grown."""
        known = set(self._computed)
        wanted = [i for i in self._likeliest() if i not in known][:WIDTH] if self._num_steps > 0 else []
        if not wanted:
            return None
        self._computed += wanted
        self._num_latest = len(wanted)
        return self._proposal(self._computed), len(self._computed) - len(wanted) + 1

    def proposal(self) -> Proposal:
        """The likeliest tokens, best first, and so each behind the one that it follows."""
        return self._proposal(self._likeliest())

    def _likeliest(self) -> list[int]:
        """Indices of the nodes to propose, best first. Who follows another is no likelier, and comes later."""
        order = sorted(range(len(self._nodes)), key=lambda i: -self._nodes[i].logprob)
        return order[: self._num_nodes]

    def _proposal(self, nodes: Sequence[int]) -> Proposal:
        rows = {-1: 0} | {node: i + 1 for i, node in enumerate(nodes)}
        chosen = [self._nodes[node] for node in nodes]
        return Proposal(tuple(node.token_id for node in chosen), parents=tuple(rows[node.parent] for node in chosen))
