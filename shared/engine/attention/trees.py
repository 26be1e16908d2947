"""Where the tokens of a step stand in their texts, when some of them belong to token trees."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shared.engine.attention.grouping import Indices
from shared.sampling.proposal import depths_of

_NOWHERE = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Trees:
    """A tree's tokens lie one after another behind the committed ones, but in the text each comes right behind the
    token that it follows: what attends sees its line of ancestors as if nothing else of the tree were there.

    `positions` `[num_tokens]`: of each packed token in its text. `starts` `[num_sequences]`: where the tree of each
    sequence begins; beyond all positions for one that has none. `parents`: where what each token of a tree follows
    lies, tree by tree, from `first_parents[i]` on those of sequence i. These are `packed`, one behind the other: as
    with `AttentionBatch`, each small array costs a step of few sequences as much.
    """

    num_tokens: int
    num_sequences: int
    packed: array[int]

    @classmethod
    def build(cls, starts: Sequence[int], lengths: Sequence[int], parents: Sequence[Sequence[int]]) -> Trees:
        """Sequence i has `lengths[i]` new tokens from `starts[i]` on. The last `len(parents[i])` to their end are its
        tree (see `Proposal.parents`), whenever they were computed."""
        positions: list[int] = []
        tree_starts: list[int] = []
        first_parents: list[int] = []
        followed: list[int] = []
        for start, length, tree in zip(starts, lengths, parents, strict=True):
            first_parents.append(len(followed))
            if not tree:
                positions += range(start, start + length)
                tree_starts.append(_NOWHERE)
                continue
            root, num_new = start + length - len(tree) - 1, min(len(tree), length)
            positions += range(start, start + length - num_new)
            positions += [root + depth for depth in depths_of(tree)[len(tree) + 1 - num_new :]]
            tree_starts.append(root + 1)
            followed += [root + parent for parent in tree]
        return cls(len(positions), len(tree_starts), array("q", [*positions, *tree_starts, *first_parents, *followed]))

    @property
    def positions(self) -> Indices:
        return np.asarray(self.packed)[: self.num_tokens]

    @property
    def starts(self) -> Indices:
        return np.asarray(self.packed)[self.num_tokens : self.num_tokens + self.num_sequences]

    @property
    def addresses(self) -> list[int]:
        """Of `positions`, `starts`, `first_parents` and `parents`, while this lives."""
        first, size = self.packed.buffer_info()[0], self.packed.itemsize
        places = (0, self.num_tokens, self.num_tokens + self.num_sequences, self.num_tokens + 2 * self.num_sequences)
        return [first + place * size for place in places]
