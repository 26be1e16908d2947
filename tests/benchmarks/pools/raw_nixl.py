"""nixl by itself: one memory registered at each end, one prepared list of descriptors, and no protocol of ours."""

from __future__ import annotations

import importlib
import time
from collections.abc import Sequence
from typing import Any

from shared.engine.kv_pool import KVPool

_CPU = 0
# By nixl's default the thread that answers peers spins: on two cores that slows whatever else is measured.
_PROGRESS_MICROSECONDS = 10_000


class RawAgent:
    """A nixl agent with a pool registered, as the library's own examples do it: polled, nothing checked."""

    def __init__(self, name: str, pool: KVPool) -> None:
        self._nixl: Any = importlib.import_module("nixl")
        self._pool = pool
        config = self._nixl.nixlAgentConfig()
        config.useProgThread = True
        config.pthrDelay = _PROGRESS_MICROSECONDS
        self._agent = self._nixl.nixlAgent(name, config)
        self._agent.createBackend("UCX", {})
        region = (pool.data.data_ptr(), pool.data.numel() * pool.data.element_size(), _CPU, "")
        self._agent.registerMem(self._nixl.nixlRegDList(self._nixl.DRAM_SEG, [region]))

    @property
    def place(self) -> tuple[bytes, int]:
        """What a reader must know: the agent's metadata, and the address of its pool."""
        return self._agent.getLocalMD(), self._pool.data.data_ptr()

    def prepare(self, place: tuple[bytes, int], sources: Sequence[int], destinations: Sequence[int]) -> int:
        """A read of the blocks `sources` at that place into these of our own, to be done any number of times."""
        metadata, address = place
        peer = self._agent.loadRemoteMD(metadata).decode()
        theirs = self._list(peer, address, sources)
        ours = self._list(self._nixl.NIXL_INIT_AGENT, self._pool.data.data_ptr(), destinations)
        every = list(range(len(sources)))
        handle: int = self._agent.makeXferReq(self._nixl.NIXL_READ, ours, every, theirs, every)
        return handle

    def read(self, handle: int) -> float:
        """Does it; the seconds it took. Raises nixl's own errors."""
        began = time.perf_counter()
        status = self._agent.postXferReq(handle)
        while status == self._nixl.NIXL_IN_PROG:
            status = self._agent.getXferStatus(handle)
        return time.perf_counter() - began

    def close(self) -> None:
        """Lets go of the pool."""
        self._agent = None

    def _list(self, agent: str, address: int, blocks: Sequence[int]) -> int:
        size = self._pool.block_num_bytes
        rows = self._nixl.nixlXferDList(self._nixl.DRAM_SEG, [(address + block * size, size, _CPU) for block in blocks])
        handle: int = self._agent.prepXferDlist(agent, rows, [])
        return handle
