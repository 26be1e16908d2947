"""What attention needs to know of one step: where each packed token's KV goes, and what each may see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from shared.engine.kv_pool import KVPool

# Sequences with at most this many new tokens (decodes, verifications) are padded together; longer ones
# (prefill chunks) apart from them, so that a chunk does not pad every decode to its length.
SHORT_QUERY = 24


@dataclass
class AttentionGroup:
    """Sequences of one step whose queries are padded to a common length.

    `query_index`: `[B, Q]` positions in the packed batch (padding repeats the sequence's last token).
    `output_index`: `[T']` positions in the flattened `[B, Q]` of the group's own tokens, packed order.
    `token_index`: `[T']` where those stand in the packed batch; None if the group is the whole batch.
    `query_positions`: `[B, Q]` positions within the sequences. `first_rows`: see `KVPool.gather`.
    """

    query_index: Tensor
    output_index: Tensor
    token_index: Tensor | None
    query_positions: Tensor
    first_rows: Tensor
    num_kv_positions: int
    padded: bool
    _masks: dict[tuple[int | None, int, torch.dtype], Tensor] = field(default_factory=dict)

    def mask(self, sliding_window: int | None, num_query_groups: int, dtype: torch.dtype) -> Tensor:
        """Additive mask `[B, 1, num_query_groups * Q, N * block_size]`: 0 where a query may look, else -inf.

        Causal; with a sliding window of w, a query at position p sees p - w < position <= p. Layers share it.
        """
        key = (sliding_window, num_query_groups, dtype)
        mask = self._masks.get(key)
        if mask is None:
            kv = torch.arange(self.num_kv_positions, device=self.query_positions.device)
            query = self.query_positions.unsqueeze(-1)
            visible = kv <= query
            if sliding_window is not None:
                visible &= kv > query - sliding_window
            mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, -torch.inf)
            mask = mask.repeat(1, num_query_groups, 1).unsqueeze(1)
            self._masks[key] = mask
        return mask


@dataclass
class AttentionBatch:
    """One step's packed tokens over a KV pool: the single keyword argument that travels through the model.

    `first_slots`: where each token's KV is written, see `KVPool.write`.
    """

    pool: KVPool
    first_slots: Tensor
    groups: list[AttentionGroup]

    @classmethod
    def build(
        cls,
        pool: KVPool,
        starts: Sequence[int],
        lengths: Sequence[int],
        block_tables: Sequence[Sequence[int]],
    ) -> AttentionBatch:
        """Sequence i has `lengths[i]` new tokens from position `starts[i]` on, packed one after another."""
        device = pool.data.device
        num_sequences = len(starts)
        start, length = np.asarray(starts), np.asarray(lengths)
        packed_start = np.concatenate([[0], np.cumsum(length)[:-1]])
        num_blocks = -(-(start + length) // pool.block_size)
        tables = np.zeros((num_sequences, int(num_blocks.max())), dtype=np.int64)
        for i, table in enumerate(block_tables):
            tables[i, : num_blocks[i]] = table[: num_blocks[i]]

        sequence_of = np.repeat(np.arange(num_sequences), length)
        positions = np.arange(len(sequence_of)) - np.repeat(packed_start - start, length)
        blocks = torch.from_numpy(tables[sequence_of, positions // pool.block_size])
        offsets = torch.from_numpy(positions % pool.block_size)
        first_slots = pool.first_slots(blocks, offsets).to(device)

        short = length <= SHORT_QUERY
        members = [np.flatnonzero(short), np.flatnonzero(~short)]
        groups = []
        for rows in members:
            if len(rows) == 0:
                continue
            longest = int(length[rows].max())
            column = np.minimum(np.arange(longest), length[rows, None] - 1)
            own = np.arange(longest) < length[rows, None]
            query_index = packed_start[rows, None] + column
            width = int(num_blocks[rows].max())
            groups.append(
                AttentionGroup(
                    query_index=torch.from_numpy(query_index).to(device),
                    output_index=torch.from_numpy(np.flatnonzero(own)).to(device),
                    token_index=None if len(rows) == num_sequences else torch.from_numpy(query_index[own]).to(device),
                    query_positions=torch.from_numpy(start[rows, None] + column).to(device),
                    first_rows=pool.first_rows(torch.from_numpy(tables[rows, :width])).to(device),
                    num_kv_positions=width * pool.block_size,
                    padded=not own.all(),
                )
            )
        return cls(pool, first_slots, groups)
