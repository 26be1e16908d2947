"""The bytes of KV blocks in host memory, and how they come there and back."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shared.engine.host_tier import BlockMover, HostTier
from shared.engine.kv_pool import KVPool, host_zeros
from shared.engine.memory import available_memory
from shared.settings import StartupError


class HostPool(BlockMover):
    """`[num_slots, num_layers, 2, block_size, num_kv_heads, head_dim]` in host memory, pinned for a CUDA device.

    Belongs to the engine's thread. Its copies go into the CUDA stream that the model runs on, and nobody waits for
    them: a block is saved before the kernels that write to it next, and loaded before those that read it.
    """

    def __init__(self, pool: KVPool, num_slots: int) -> None:
        """Raises MemoryError, ValueError or RuntimeError if there is no such memory, or it cannot be pinned."""
        self._pool = pool
        self.data = host_zeros((num_slots, *pool.data.shape[1:]), pool.data.dtype)
        if pool.data.is_cuda:
            weakref.finalize(self, _pin(self.data, pool.data.device)).atexit = False

    def save(self, block: int, slot: int) -> None:
        self.data[slot].copy_(self._pool.data[block], non_blocking=True)

    def load(self, slot: int, block: int) -> None:
        self._pool.data[block].copy_(self.data[slot], non_blocking=True)

    def settle(self) -> None:
        if self._pool.data.is_cuda:
            torch.cuda.current_stream(self._pool.data.device).synchronize()


def make_host_tier(pool: KVPool, gib: float, num_promised_bytes: int = 0) -> HostTier:
    """A host tier of so many GiB for the blocks of `pool`, beside what is promised to others and not taken yet. Raises
    StartupError if there is no such memory."""
    num_bytes = int(gib * 2**30)
    num_slots = num_bytes // pool.block_num_bytes
    if num_slots < 1:
        raise StartupError(f"host_cache_gib is {gib}: a KV block alone takes {pool.block_num_bytes / 2**30:.3f}")
    # Asked first: memory that a container may not use is given all the same, and costs the process its life later.
    available = max(0, available_memory() - num_promised_bytes)
    if num_bytes > available:
        raise StartupError(f"host_cache_gib is {gib}: {available / 2**30:.3f} GiB of RAM are free beside the KV cache")
    try:
        return HostTier(num_slots, HostPool(pool, num_slots))
    except (RuntimeError, MemoryError, ValueError) as error:
        raise StartupError(f"host_cache_gib is {gib}: so much RAM cannot be had, or not be pinned") from error


def _pin(memory: Tensor, device: torch.device) -> Callable[[], object]:
    """Lets the device copy from and to this memory by itself; returns what ends that. Raises RuntimeError.

    Not by memory that torch pins: of that, it takes the next power of two.
    """
    cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    with torch.cuda.device(device):
        torch.cuda.check_error(cudart.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
    return partial(cudart.cudaHostUnregister, memory.data_ptr())
