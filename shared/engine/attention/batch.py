"""What attention needs to know of one step: where each packed token's KV goes, and what each may see."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from operator import add
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from shared.engine.attention.grouping import Indices, group_sequences
from shared.engine.attention.trees import Trees
from shared.engine.cuda.kernels import TritonKernels
from shared.engine.kv_pool import KVPool
from shared.engine.native.library import Library
from shared.engine.native.step import NativeStep
from shared.sampling.proposal import Proposal

if TYPE_CHECKING:
    from shared.engine.cuda.step import CudaStep

# By which a GPU's kernels tell who sees whom in a tree.
_WORD_BITS = 64

# Pairs of query and position whose masks a step keeps from layer to layer; the others are made anew in each.
# A chunk of 512 tokens over 16k of context is kept: 64 MiB, in bf16 with four query heads to a KV head.
_MAX_KEPT_PAIRS = 1 << 23


class _Limits(NamedTuple):
    """In bytes of KV: what a layer gathers in the time that it takes to launch a further group, and the most that
    it gathers for one group, unless a single sequence needs more."""

    launch: int
    gathered: int


# A CPU copies about 1 MiB in the time of a group's dozen operations, and gathers of more than its caches hold
# are slower; a GPU copies far more in that time.
_CPU_LIMITS = _Limits(launch=1 << 20, gathered=1 << 25)
_LIMITS = _Limits(launch=1 << 25, gathered=1 << 27)


@dataclass(frozen=True)
class GatheredKV:
    """The KV that a group's queries look at in one layer, N blocks for each of B sequences.

    `first_rows`: see `KVPool.gather`. `positions`: `[B, 1, N * block_size]`, or `[1, 1, ...]` if they are
    the same for all: what position of the sequence each gathered one is.
    """

    first_rows: Tensor
    positions: Tensor


@dataclass
class TreeColumns:
    """What the queries of a tree see of it, in a group of sequences.

    `row`: of its sequence in the group; `first`: where its `size` tokens lie, one behind the other. `queries` and
    `seen`: pairs of a query and a token of the tree that it sees, itself included; `distances`: how far these are apart
    in the text.
    """

    row: int
    first: int
    size: int
    queries: Tensor
    seen: Tensor
    distances: Tensor


@dataclass
class AttentionGroup:
    """Sequences of one step that attend together, padded to their longest query and context.

    `query_index`: `[B, Q]` positions in the packed batch (padding repeats the sequence's last token).
    `output_index`: `[T']` positions in the flattened `[B, Q]` of the group's own tokens, packed order.
    `token_index`: `[T']` where those stand in the packed batch; None if the group is the whole batch.
    `query_positions`: `[B, Q]` positions within the sequences, the first of them `starts`; `trees`: of those that have
    one, whose positions are not where its tokens lie.
    `blocks`: `[B, N]` the sequences' blocks (padding repeats the last).
    """

    pool: KVPool
    query_index: Tensor
    output_index: Tensor
    token_index: Tensor | None
    query_positions: Tensor
    starts: Indices
    blocks: Indices
    padded: bool
    keeps_masks: bool
    trees: list[TreeColumns]
    _kv: dict[int | None, GatheredKV] = field(default_factory=dict)
    _masks: dict[tuple[int | None, int, torch.dtype, int, int], Tensor] = field(default_factory=dict)

    @property
    def num_kv_positions(self) -> int:
        """Positions gathered for each sequence by a layer without a sliding window."""
        return int(self.blocks.shape[1]) * self.pool.block_size

    def kv(self, sliding_window: int | None) -> GatheredKV:
        """What layers with this window gather: all blocks, or those that the window of some query reaches."""
        gathered = self._kv.get(sliding_window)
        if gathered is None:
            device, block_size = self.query_positions.device, self.pool.block_size
            blocks, width = self.blocks, self.blocks.shape[1]
            positions = np.arange(width * block_size)[None]
            if sliding_window is not None:
                begins = self.starts.copy()
                for tree in self.trees:
                    # What grows in several steps lies further on than it stands in the text.
                    begins[tree.row] = min(begins[tree.row], tree.first)
                first = np.maximum(begins - sliding_window + 1, 0) // block_size
                last = (self.starts + self.query_positions.shape[1] - 1) // block_size
                reached = int(min((last - first).max() + 1, width))
                if reached < width:
                    blocks = np.take_along_axis(blocks, np.minimum(first[:, None] + np.arange(reached), width - 1), 1)
                    positions = first[:, None] * block_size + np.arange(reached * block_size)
            gathered = GatheredKV(
                self.pool.first_rows(torch.from_numpy(blocks)).to(device),
                torch.from_numpy(positions).unsqueeze(1).to(device),
            )
            self._kv[sliding_window] = gathered
        return gathered

    def mask(
        self, sliding_window: int | None, num_query_groups: int, dtype: torch.dtype, first: int, last: int
    ) -> Tensor:
        """Additive mask `[B, 1, num_query_groups * (last - first), N * block_size]` of queries first to last - 1
        over `kv(sliding_window)`: 0 where a query may look, else -inf.

        Causal; with a sliding window of w, a query at position p sees p - w < position <= p; of a tree its own line of
        ancestors. Layers share it.
        """
        key = (sliding_window, num_query_groups, dtype, first, last)
        mask = self._masks.get(key)
        if mask is None:
            positions = self.kv(sliding_window).positions
            query = self.query_positions[:, first:last].unsqueeze(-1)
            hidden = positions > query
            if sliding_window is not None:
                hidden |= positions <= query - sliding_window
            for tree in self.trees:
                # Gathered are successive positions, from a block's first one on.
                column = tree.first - int(positions[tree.row if len(positions) > 1 else 0, 0, 0])
                own = hidden[tree.row, :, column : column + tree.size]
                own.fill_(True)
                near = (tree.queries >= first) & (tree.queries < last)
                if sliding_window is not None:
                    near &= tree.distances < sliding_window
                own[tree.queries[near] - first, tree.seen[near]] = False
            mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -torch.inf)
            mask = mask.repeat(1, num_query_groups, 1).unsqueeze(1)
            if self.keeps_masks:
                self._masks[key] = mask
        return mask


@dataclass
class AttentionBatch:
    """One step's packed tokens over a KV pool: the single keyword argument that travels through the model.

    Sequence i of `num_sequences` has `lengths[i]` new tokens from position `starts[i]` on, packed one after another
    from `packed_starts[i]` on; its blocks begin at `tables[table_starts[i]]`. These five arrays are `packed`, one
    behind the other. Where there are kernels of our own for the pool, they attend; where not, PyTorch does, by groups.
    """

    pool: KVPool
    num_sequences: int
    num_tokens: int
    num_positions: int
    packed: array[int]
    kernels: Library | TritonKernels | None = None
    parents: Sequence[Sequence[int]] | None = None

    @classmethod
    def build(
        cls,
        pool: KVPool,
        starts: Sequence[int],
        lengths: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        kernels: Library | TritonKernels | None = None,
        parents: Sequence[Sequence[int]] | None = None,
    ) -> AttentionBatch:
        """Sequence i has `lengths[i]` new tokens from position `starts[i]` on, packed one after another. With `parents`
        its last `len(parents[i])` tokens, whenever they were computed, are a tree (see `Proposal.parents`)."""
        ends = list(map(add, starts, lengths))
        num_blocks = [-(-end // pool.block_size) for end in ends]
        # One array, as every small one costs a step of few sequences as much.
        indices = [*starts, *lengths, *_firsts(lengths), *_firsts(num_blocks)]
        # All block tables one behind the other: padded to a rectangle, one long one would make it huge.
        for table, count in zip(block_tables, num_blocks, strict=True):
            indices.extend(table[:count])
        return cls(pool, len(ends), sum(lengths), max(ends), array("q", indices), kernels, parents)

    @property
    def own(self) -> NativeStep | CudaStep | None:
        """What attends by kernels of our own; None where there are none."""
        return self.native or self.cuda

    @cached_property
    def cuda(self) -> CudaStep | None:
        """The step as those of a GPU see it; None where there are none."""
        return self.kernels.step(self) if isinstance(self.kernels, TritonKernels) and self.fits_words else None

    @property
    def fits_words(self) -> bool:
        """Whether the tokens of each tree are no more than a word has bits."""
        return self.parents is None or max(map(len, self.parents), default=0) <= _WORD_BITS

    @cached_property
    def native(self) -> NativeStep | None:
        """The step as those of a CPU see it; None where there are none."""
        if not isinstance(self.kernels, Library):
            return None
        return NativeStep(
            self.kernels, self.pool, self.num_sequences, self.num_tokens, self.num_positions, self.packed, self.trees
        )

    @cached_property
    def trees(self) -> Trees | None:
        """None where there are none in this step."""
        if self.parents is None or not any(self.parents):
            return None
        starts, lengths = self.packed[: self.num_sequences], self.packed[self.num_sequences : 2 * self.num_sequences]
        return Trees.build(starts, lengths, self.parents)

    @cached_property
    def indices(self) -> Indices:
        """A view of `packed`, for all but the CPU's kernels, which read it where it lies."""
        return np.asarray(self.packed)

    @property
    def starts(self) -> Indices:
        return self.indices[: self.num_sequences]

    @property
    def lengths(self) -> Indices:
        return self.indices[self.num_sequences : 2 * self.num_sequences]

    @property
    def packed_starts(self) -> Indices:
        return self.indices[2 * self.num_sequences : 3 * self.num_sequences]

    @property
    def table_starts(self) -> Indices:
        return self.indices[3 * self.num_sequences : 4 * self.num_sequences]

    @property
    def tables(self) -> Indices:
        return self.indices[4 * self.num_sequences :]

    @cached_property
    def slots(self) -> Indices:
        """Where each packed token's KV lies among its sequence's blocks: at its position, but in trees."""
        return np.arange(self.num_tokens) - np.repeat(self.packed_starts - self.starts, self.lengths)

    @property
    def positions(self) -> Indices:
        """Of each packed token in its sequence."""
        return self.slots if self.trees is None else self.trees.positions

    @cached_property
    def first_slots(self) -> Tensor:
        """Where each token's KV is written, see `KVPool.write`."""
        pool, slots = self.pool, self.slots
        sequence_of = np.repeat(np.arange(self.num_sequences), self.lengths)
        blocks = torch.from_numpy(self.tables[self.table_starts[sequence_of] + slots // pool.block_size])
        offsets = torch.from_numpy(slots % pool.block_size)
        return pool.first_slots(blocks, offsets).to(pool.data.device)

    @cached_property
    def groups(self) -> list[AttentionGroup]:
        pool, device = self.pool, self.pool.data.device
        start, length, packed_start = self.starts, self.lengths, self.packed_starts
        positions = torch.from_numpy(self.positions).to(device)
        num_blocks = -(-(start + length) // pool.block_size)
        limits = _CPU_LIMITS if device.type == "cpu" else _LIMITS
        pairs_left = _MAX_KEPT_PAIRS
        groups = []
        for rows in group_sequences(
            length,
            num_blocks * pool.block_size,
            limits.launch / pool.position_bytes,
            limits.gathered // pool.position_bytes,
        ):
            longest, width = int(length[rows].max()), int(num_blocks[rows].max())
            column = np.minimum(np.arange(longest), length[rows, None] - 1)
            own = np.arange(longest) < length[rows, None]
            query_index = packed_start[rows, None] + column
            block_column = np.minimum(np.arange(width), num_blocks[rows, None] - 1)
            num_pairs = query_index.size * width * pool.block_size
            keeps_masks = num_pairs <= pairs_left
            pairs_left -= num_pairs if keeps_masks else 0
            packed = torch.from_numpy(query_index).to(device)
            groups.append(
                AttentionGroup(
                    pool=pool,
                    query_index=packed,
                    output_index=torch.from_numpy(np.flatnonzero(own)).to(device),
                    token_index=None
                    if len(rows) == self.num_sequences
                    else torch.from_numpy(query_index[own]).to(device),
                    query_positions=positions[packed],
                    starts=start[rows],
                    blocks=self.tables[self.table_starts[rows, None] + block_column],
                    padded=not own.all(),
                    keeps_masks=keeps_masks,
                    trees=self._tree_columns(rows, longest),
                )
            )
        return groups

    def _tree_columns(self, rows: Indices, num_queries: int) -> list[TreeColumns]:
        """Those of the sequences `rows`, which attend together, each padded to so many queries by its last."""
        if self.trees is None or self.parents is None:
            return []
        found, device = [], self.pool.data.device
        for row, sequence in enumerate(rows):
            tree = Proposal((0,) * len(self.parents[sequence]), parents=tuple(self.parents[sequence]))
            if not tree:
                continue
            start, length = int(self.starts[sequence]), int(self.lengths[sequence])
            root = start + length - len(tree) - 1
            pairs = [
                (query, node, distance)
                for query in range(max(0, root - start + 1), num_queries)
                for distance, node in enumerate(reversed(tree.lineage(start + min(query, length - 1) - root)))
            ]
            queries, seen, distances = torch.tensor(pairs, device=device).T
            found.append(TreeColumns(row, root + 1, len(tree), queries, seen, distances))
        return found


def _firsts(counts: Sequence[int]) -> list[int]:
    """Where each begins, of so many each, one behind the other."""
    return [0, *accumulate(counts)][:-1]
