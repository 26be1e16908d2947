"""One step's sequences, and where their KV is, as the kernels see them."""

from __future__ import annotations

from ctypes import byref

import torch
from torch import Tensor

from shared.engine.attention.grouping import Indices
from shared.engine.kv_pool import KVPool
from shared.engine.native.library import Attention, Batch, Heads, Library


class NativeStep:
    """Sequence i has `lengths[i]` new tokens from position `starts[i]` on, packed one after another from
    `first_tokens[i]` on; its blocks begin at `tables[first_blocks[i]]`. The pool is on the CPU, in bf16 or float32."""

    def __init__(
        self,
        library: Library,
        pool: KVPool,
        starts: Indices,
        lengths: Indices,
        first_tokens: Indices,
        first_blocks: Indices,
        tables: Indices,
    ) -> None:
        self._library = library
        # The structures hold addresses: what they point to must live as long.
        self._kept = (pool, starts, lengths, first_tokens, first_blocks, tables)
        self.num_tokens = int(lengths.sum())
        self.num_positions = int((starts + lengths).max())
        self.batch = Batch(
            len(starts),
            self.num_tokens,
            *(array.ctypes.data for array in self._kept[1:]),
        )
        self.pool = pool.described

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        sliding_window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """As `attention.paged.attend`."""
        query, key, value = (_with_plain_rows(tensor) for tensor in (query, key, value))
        out = query.new_empty((self.num_tokens, query.shape[1], self.pool.value_dim))
        weights = None if sinks is None else sinks.detach().float().contiguous()
        how = Attention(
            query.shape[1], sliding_window or 0, scale, softcap or 0.0, None if weights is None else weights.data_ptr()
        )
        self._library.attend(
            byref(how),
            byref(self.pool),
            layer,
            byref(self.batch),
            *(byref(Heads(x.data_ptr(), x.stride(0), x.stride(1))) for x in (query, key, value)),
            out.data_ptr(),
            torch.get_num_threads(),
        )
        return out


def _with_plain_rows(x: Tensor) -> Tensor:
    """`[tokens, heads, dim]` with the numbers of a head one after another."""
    return x if x.stride(-1) == 1 else x.contiguous()
