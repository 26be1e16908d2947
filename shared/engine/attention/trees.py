"""Where the tokens of a step stand in their texts, when some of them belong to token trees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shared.engine.attention.grouping import Indices
from shared.sampling.proposal import depths_of

_NOWHERE = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True)
class Trees:
    """A tree's tokens lie one after another behind the committed ones, but in the text each comes right behind the
    token that it follows: what attends sees its line of ancestors as if nothing else of the tree were there.

    `positions` `[T]`: of each packed token in its text. `starts` `[S]`: where the tree of each sequence begins; beyond
    all positions for one that has none. `parents`: where what each token of a tree follows lies, tree by tree, from
    `first_parents[i]` on those of sequence i.
    """

    positions: Indices
    starts: Indices
    first_parents: Indices
    parents: Indices

    @classmethod
    def build(
        cls, slots: Indices, ends: Indices, lengths: Indices, firsts: Indices, parents: Sequence[Sequence[int]]
    ) -> Trees:
        """`slots` `[T]`: where each packed token lies. The last `len(parents[i])` positions before `ends[i]` hold the
        tree of sequence i (see `Proposal.parents`), of whose tokens the last `lengths[i]`, packed from `firsts[i]` on,
        are computed in this step."""
        positions, starts = slots.copy(), np.full(len(ends), _NOWHERE)
        first_parents = np.zeros(len(ends), dtype=np.int64)
        followed: list[int] = []
        for i, tree in enumerate(parents):
            first_parents[i] = len(followed)
            if not tree:
                continue
            root, num_new = int(ends[i]) - len(tree) - 1, min(len(tree), int(lengths[i]))
            starts[i] = root + 1
            last = int(firsts[i] + lengths[i])
            positions[last - num_new : last] = root + np.array(depths_of(tree)[len(tree) + 1 - num_new :])
            followed += [root + parent for parent in tree]
        return cls(positions, starts, first_parents, np.array(followed, dtype=np.int64))
