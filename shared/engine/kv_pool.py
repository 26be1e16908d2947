"""The KV cache of one model: a single block-major tensor, so that a block is one contiguous byte range."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from shared.engine.native.library import Pool

LAYOUT_VERSION = 1

# Bytes of a cache line, which torch's own tensors begin at.
_ALIGNMENT = 64


class KVShape(NamedTuple):
    """What one token's KV looks like. Keys and values of unequal head size share the larger one."""

    num_layers: int
    num_kv_heads: int
    key_head_dim: int
    value_head_dim: int

    @property
    def head_dim(self) -> int:
        return max(self.key_head_dim, self.value_head_dim)


class KVPool:
    """`[num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]`, zeroed; 2 is key, value.

    Block b is the contiguous range `data[b]`: one transfer descriptor, one stored value, one wire chunk. In RAM a page
    becomes real when it is first written, or with `commit`.
    """

    def __init__(
        self, shape: KVShape, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.shape = shape
        self.num_blocks = num_blocks
        self.block_size = block_size
        size = (num_blocks, shape.num_layers, 2, block_size, shape.num_kv_heads, shape.head_dim)
        self.data = host_zeros(size, dtype) if device.type == "cpu" else torch.zeros(size, dtype=dtype, device=device)
        # Views that attention works on: a row is one block's keys (or values) in one layer.
        self._tokens = self.data.view(-1, shape.num_kv_heads, shape.head_dim)
        self._rows = self.data.view(num_blocks * shape.num_layers * 2, -1)
        self.beside: KVPool | None = None
        """What a smaller model keeps of the same positions, in blocks of the same numbers."""
        self.on_copied: Callable[[Iterable[int]], object] = lambda _: None
        """Is told which blocks others were copied to."""

    def add_beside(self, shape: KVShape, dtype: torch.dtype) -> None:
        self.beside = KVPool(shape, self.num_blocks, self.block_size, dtype, self.data.device)

    @staticmethod
    def block_bytes(shape: KVShape, block_size: int, dtype: torch.dtype) -> int:
        return shape.num_layers * 2 * block_size * shape.num_kv_heads * shape.head_dim * dtype.itemsize

    @cached_property
    def _bytes(self) -> NDArray[np.uint8]:
        """Of `data`, in RAM."""
        data: NDArray[np.uint8] = self.data.view(torch.uint8).numpy()
        return data

    @cached_property
    def described(self) -> Pool:
        """Where everything is, for kernels of our own; of a pool on the CPU, in bf16 or float32."""
        shape, stride = self.shape, self.data.stride()
        return Pool(
            data=self.data.data_ptr(),
            is_bf16=self.data.dtype == torch.bfloat16,
            block_size=self.block_size,
            num_kv_heads=shape.num_kv_heads,
            key_dim=shape.key_head_dim,
            value_dim=shape.value_head_dim,
            block_stride=stride[0],
            layer_stride=stride[1],
            value_offset=stride[2],
            position_stride=stride[3],
            head_stride=stride[4],
        )

    @property
    def position_bytes(self) -> int:
        """Bytes of one position's key and value in one layer."""
        return 2 * self.shape.num_kv_heads * self.shape.head_dim * self.data.element_size()

    @property
    def block_num_bytes(self) -> int:
        """Bytes of one block: block b is the range from b times this of `data`'s memory on."""
        return self.data[0].numel() * self.data.element_size()

    def read_block(self, block: int) -> bytes:
        """The bytes of a block, which nobody may be writing to."""
        return self.data[block].cpu().view(-1).view(torch.uint8).numpy().tobytes()

    def write_block(self, block: int, payload: bytes | bytearray | memoryview) -> None:
        """Puts the bytes of another pool's block into this one, which nobody else may be using.

        Raises ValueError for a payload of another length.
        """
        if len(payload) != self.block_num_bytes:
            raise ValueError(f"a block has {self.block_num_bytes} bytes, the payload {len(payload)}")
        incoming, place = np.frombuffer(payload, dtype=np.uint8), self.data[block].view(-1).view(torch.uint8)
        if place.is_cuda:
            # A copy of its own: torch wants memory that could be written to.
            place.copy_(torch.from_numpy(incoming.copy()))
        else:
            place.numpy()[:] = incoming

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        """Copies whole blocks, (source, destination), with what is `beside` them; every source is read before any is
        written."""
        if copies:
            sources, destinations = zip(*copies, strict=True)
            self.data[list(destinations)] = self.data[list(sources)]
            self.on_copied(destinations)
            if self.beside is not None:
                self.beside.copy_blocks(copies)

    def move_positions(self, moves: Sequence[tuple[tuple[int, int], tuple[int, int]]]) -> None:
        """Copies single positions, in all layers, from one (block, offset) to another; all are read before any is
        written."""
        if moves and not self.data.is_cuda:
            # Torch takes six times as long for so little: a round of drafts waits for it.
            data = self._bytes
            moved = [data[block, :, :, offset].copy() for (block, offset), _ in moves]
            for positions, (_, (block, offset)) in zip(moved, moves, strict=True):
                data[block, :, :, offset] = positions
        elif moves:
            (blocks, offsets), (to_blocks, to_offsets) = (torch.tensor(places).T for places in zip(*moves, strict=True))
            self.data[to_blocks, :, :, to_offsets] = self.data[blocks, :, :, offsets]

    def first_slots(self, blocks: Tensor, offsets: Tensor) -> Tensor:
        """Slots in layer 0 of T keys, then of their T values, at these blocks and offsets (`[T]`); see `write`."""
        keys = blocks * (self.shape.num_layers * 2 * self.block_size) + offsets
        return torch.cat([keys, keys + self.block_size])

    def first_rows(self, blocks: Tensor) -> Tensor:
        """Rows in layer 0 of the keys, then of the values, of these blocks (any shape, flattened); see `gather`."""
        keys = blocks.reshape(-1) * (self.shape.num_layers * 2)
        return torch.cat([keys, keys + 1])

    def commit(self) -> None:
        """Takes all of the memory now. What is in it is lost.

        A first write to a page waits for the system to find one: steps, and even more so blocks that come from other
        workers, are slower by that until every block was in use once.
        """
        self.data.zero_()
        if self.beside is not None:
            self.beside.commit()

    def write(self, layer: int, first_slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Stores `[T, num_kv_heads, key/value_head_dim]` at the slots of T tokens.

        Not-a-numbers become 0: blocks are reused, and masked positions read, where a NaN would spread.
        """
        if key.shape[-1] != value.shape[-1]:
            missing = self.shape.head_dim - min(key.shape[-1], value.shape[-1])
            if key.shape[-1] < value.shape[-1]:
                key = functional.pad(key, (0, missing))
            else:
                value = functional.pad(value, (0, missing))
        both = torch.cat([key, value]).nan_to_num_(0.0, 0.0, 0.0)
        self._tokens.index_copy_(0, first_slots + layer * 2 * self.block_size, both)

    def gather(self, layer: int, first_rows: Tensor, batch: int) -> tuple[Tensor, Tensor]:
        """Keys and values of `batch` sequences' blocks, N each, whose `first_rows` are `[2 * batch * N]`.

        Each result is `[batch, N * block_size, num_kv_heads, key/value_head_dim]`.
        """
        rows = self._rows.index_select(0, first_rows + layer * 2)
        keys, values = rows.view(2, batch, -1, self.shape.num_kv_heads, self.shape.head_dim).unbind()
        if self.shape.key_head_dim != self.shape.value_head_dim:
            keys, values = keys[..., : self.shape.key_head_dim], values[..., : self.shape.value_head_dim]
        return keys, values


def host_zeros(size: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Zeros in RAM that become real page by page when they are first written.

    `torch.zeros` writes them at once: seconds for every GiB, of which most may never be used.
    """
    num_bytes = math.prod(size) * dtype.itemsize
    memory = torch.from_numpy(np.zeros(num_bytes + _ALIGNMENT, dtype=np.uint8))
    start = -memory.data_ptr() % _ALIGNMENT
    return memory[start : start + num_bytes].view(dtype).view(size)
