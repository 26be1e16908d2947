"""One step's sequences, and where their KV is, as the kernels see them."""

from __future__ import annotations

from array import array
from ctypes import byref

import torch
from torch import Tensor

from shared.engine.attention.trees import Trees
from shared.engine.kv_pool import KVPool
from shared.engine.native.library import Attention, Batch, Heads, Library

# Of a batch, each with a number for every sequence but the last, the block tables.
_NUM_ARRAYS = 5


class NativeStep:
    """`packed` is that of an `AttentionBatch`. The pool is on the CPU, in bf16 or float32."""

    def __init__(
        self,
        library: Library,
        pool: KVPool,
        num_sequences: int,
        num_tokens: int,
        num_positions: int,
        packed: array[int],
        trees: Trees | None,
    ) -> None:
        self._library = library
        # The structures hold addresses: what they point to must live as long.
        self._kept = (pool, packed, trees)
        self.num_tokens = num_tokens
        self.num_positions = num_positions
        first, size = packed.buffer_info()[0], num_sequences * packed.itemsize
        arrays = [first + i * size for i in range(_NUM_ARRAYS)]
        if trees is not None:
            arrays += trees.addresses
        self.batch = Batch(num_sequences, num_tokens, *arrays)
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
