"""nixl's own calls: a pool registered, peers made known, reads begun and seen to their end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from shared.engine.kv_pool import KVPool
from shared.transfer.engine import BlockRead, TransferFailed
from shared.transfer.nixl.library import NixlErrors, import_nixl
from shared.transfer.nixl.place import Place

# Where no direct way leads to a peer's memory, UCX would ask its process for the bytes, over TCP. Not for us: blocks
# are still written to when the answer comes to a reader that gave up, and a worker aborts whose reader left before it
# could answer (UCX 1.23).
_UCX_CONFIG = "PROTO_EMULATION_ENABLE=n"
# Time between two looks of the thread in which nixl answers peers that connect, if nothing wakes it. 0, nixl's
# default, has it spin.
_PROGRESS_MICROSECONDS = 10_000

# Read from a peer to see whether that can be done.
_HELLO_BYTES = 64
# Kinds of memory, by torch's name and by nixl's.
_DEVICE_TYPES = ("cpu", "cuda")
_SEGMENTS = ("DRAM_SEG", "VRAM_SEG")


class Remote(NamedTuple):
    """A peer's agent, as known to one of ours."""

    agent: Agent
    name: str
    place: Place
    # nixl's handle of the list of its blocks.
    blocks: int


class Begun(NamedTuple):
    """A transfer: nixl's handle, and whether it has ended (memory of the same machine is copied at once)."""

    handle: int
    has_ended: bool


class Agent:
    """A nixl agent with a pool registered. Every call is made by one thread, and may raise TransferFailed.

    A transfer has ended when `has_ended` says so, when that raises, or when the agent is closed. To release it does
    not end it: UCX goes on with a read, whoever wants it.
    """

    def __init__(self, pool: KVPool, name: str) -> None:
        """Raises ImportError, too."""
        self._nixl = import_nixl()
        # Held for as long as nixl knows of it.
        self._data = pool.data
        self._hello = torch.empty(_HELLO_BYTES, dtype=torch.uint8, device=pool.data.device)
        kind, device = _DEVICE_TYPES.index(pool.data.device.type), max(0, pool.data.get_device())
        place = Place(kind, device, pool.data.data_ptr(), pool.block_num_bytes, pool.num_blocks, b"")
        config = self._nixl.nixlAgentConfig()
        config.useProgThread = True
        config.pthrDelay = _PROGRESS_MICROSECONDS
        with NixlErrors():
            self._agent: Any = self._nixl.nixlAgent(name, config)
            self._agent.createBackend("UCX", {"engine_config": _UCX_CONFIG})
            self._register(place, self._data)
            self.place = place._replace(agent=self._agent.getLocalMD())
            # Only now: peers need not know of it.
            self._register(place, self._hello)
            self._blocks = self._list_blocks(self._nixl.NIXL_INIT_AGENT, place)

    def load(self, place: Place) -> Remote:
        """Makes a peer known that is not."""
        with self._unclosed():
            name = self._agent.loadRemoteMD(place.agent).decode()
            try:
                return Remote(self, name, place, self._list_blocks(name, place))
            except BaseException:
                self._agent.invalidateRemoteMD(name)
                raise

    def forget(self, remote: Remote) -> None:
        """No read from it may be under way."""
        with self._unclosed():
            self._agent.releasedDlistH(remote.blocks)
            self._agent.invalidateRemoteMD(remote.name)

    def start_hello(self, remote: Remote) -> Begun:
        """Begins to read the peer's first bytes, into memory of no importance."""
        num_bytes = min(_HELLO_BYTES, self.place.block_bytes)
        with self._unclosed():
            ours = self._range(self.place, self._hello.data_ptr(), num_bytes)
            theirs = self._range(remote.place, remote.place.address, num_bytes)
            return self._post(self._agent.createXferReq(self._nixl.NIXL_READ, ours, theirs, remote.name))

    def start_read(self, remote: Remote, reads: Sequence[BlockRead]) -> Begun:
        """Begins to read blocks; nixl makes one of those that are adjacent on both sides."""
        theirs, ours = zip(*reads, strict=True)
        with self._unclosed():
            read = self._nixl.NIXL_READ
            return self._post(self._agent.makeXferReq(read, self._blocks, ours, remote.blocks, theirs))

    def has_ended(self, handle: int) -> bool:
        """Whether everything is there."""
        with self._unclosed():
            return bool(self._agent.getXferStatus(handle) == self._nixl.NIXL_SUCCESS)

    def release(self, handle: int) -> None:
        with self._unclosed():
            self._agent.releaseXferReq(handle)

    def close(self) -> None:
        self._agent = None

    def _unclosed(self) -> NixlErrors:
        if self._agent is None:
            raise TransferFailed("the nixl agent is closed")
        return NixlErrors()

    def _register(self, place: Place, memory: torch.Tensor) -> None:
        region = (memory.data_ptr(), memory.numel() * memory.element_size(), place.device, "")
        self._agent.registerMem(self._nixl.nixlRegDList(self._segment(place), [region]))

    def _list_blocks(self, agent_name: str, place: Place) -> int:
        # The first one's address, bytes of each, device, bytes from one to the next, how many.
        row = (place.address, place.block_bytes, place.device, place.block_bytes, place.num_blocks)
        rows = np.array([row], dtype=np.uint64)
        handle: int = self._agent.prepXferDlist(agent_name, self._segment(place), rows, [])
        return handle

    def _range(self, place: Place, address: int, num_bytes: int) -> Any:
        return self._nixl.nixlXferDList(self._segment(place), [(address, num_bytes, place.device)])

    def _segment(self, place: Place) -> Any:
        return getattr(self._nixl, _SEGMENTS[place.kind])

    def _post(self, handle: int) -> Begun:
        try:
            status = self._agent.postXferReq(handle)
        except BaseException:
            self._agent.releaseXferReq(handle)
            raise
        return Begun(handle, status == self._nixl.NIXL_SUCCESS)
