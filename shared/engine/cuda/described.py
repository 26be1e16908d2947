"""A step of many sequences as numbers: what its attention needs, for each window that layers have."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from shared.engine.attention.batch import AttentionBatch
from shared.engine.attention.grouping import Indices
from shared.engine.cuda.work import Plan, StepShape, plan_work
from shared.sampling.proposal import depths_of

_NOWHERE = np.iinfo(np.int64).max


class DescribedStep:
    """Of a batch, whose trees have no more tokens than a word has bits."""

    def __init__(self, batch: AttentionBatch) -> None:
        self._batch = batch

    @property
    def has_trees(self) -> bool:
        return self._batch.trees is not None

    @cached_property
    def places(self) -> Indices:
        """Where in the pool, in layer 0, each packed token's key belongs, in numbers of its type."""
        batch, stride = self._batch, self._batch.pool.data.stride()
        of, slots = np.repeat(np.arange(batch.num_sequences), batch.lengths), batch.slots
        size = batch.pool.block_size
        places: Indices = batch.tables[batch.table_starts[of] + slots // size] * stride[0] + slots % size * stride[3]
        return places

    def plan(self, fold: int, window: int | None) -> Plan:
        """For layers in which so many heads share a KV head."""
        pool = self._batch.pool
        head_bytes = pool.shape.head_dim * pool.data.element_size()
        return plan_work(self._shape, fold, pool.shape.num_kv_heads, window, head_bytes)

    def ancestors(self, window: int | None) -> Indices:
        """Of each packed token the tokens of its tree that it sees, itself included, as the bits of a word: those of
        its line, as far as the window reaches."""
        batch = self._batch
        seen = np.zeros(batch.num_tokens, dtype=np.int64)
        if not self.has_trees or batch.parents is None:
            return seen
        for i, tree in enumerate(batch.parents):
            if not tree:
                continue
            end, num_new = int(batch.packed_starts[i] + batch.lengths[i]), min(len(tree) + 1, int(batch.lengths[i]))
            words = np.array(_lines(tree, window)[len(tree) + 1 - num_new :], dtype=np.uint64)
            seen[end - num_new : end] = words.view(np.int64)
        return seen

    @cached_property
    def _shape(self) -> StepShape:
        batch = self._batch
        return StepShape(
            batch.starts,
            batch.lengths,
            batch.packed_starts,
            np.minimum.reduceat(batch.positions, batch.packed_starts),
            batch.table_starts,
            np.full(batch.num_sequences, _NOWHERE) if batch.trees is None else batch.trees.starts,
        )


def _lines(tree: Sequence[int], window: int | None) -> list[int]:
    """Of each row of a tree (see `Proposal.parents`) the bits of the tokens that it sees; the first sees none."""
    lines, depths = [0], depths_of(tree)
    for row, parent in enumerate(tree, 1):
        lines.append(lines[parent] | 1 << (row - 1))
    if window is None or window > max(depths):
        return lines
    return [
        sum(
            1 << (other - 1)
            for other in range(1, row + 1)
            if line >> (other - 1) & 1 and depths[row] - depths[other] < window
        )
        for row, line in enumerate(lines)
    ]
