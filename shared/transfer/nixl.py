"""Blocks read out of a peer's memory by nixl: by RDMA, from GPU to GPU, or from another process of the same machine.

nixl (https://github.com/ai-dynamo/nixl, over UCX) is optional and for Linux only: it is imported when an engine is
made. Workers that none of these ways connects cannot read from each other with it; the first try is TransferFailed.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import struct
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from types import ModuleType
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

from shared.engine.kv_pool import KVPool
from shared.transfer.engine import BlockRead, TransferEngine, TransferFailed, TransferPeer

logger = logging.getLogger(__name__)

# Where no direct way leads to a peer's memory, UCX would ask its process for the bytes, over TCP. Not for us: blocks
# are still written to when the answer comes to a reader that gave up, and a worker aborts whose reader left before it
# could answer (UCX 1.23).
_UCX_CONFIG = "PROTO_EMULATION_ENABLE=n"
# Time between two looks of the thread in which nixl answers peers that connect, if nothing wakes it. 0, nixl's
# default, has it spin.
_PROGRESS_MICROSECONDS = 10_000

# A read is done in parts of this size. Between two of them it can be cancelled, and other reads have their turn.
_PART_BYTES = 128 * 2**20
# UCX itself gives up sooner on a peer that is gone.
_PART_SECONDS = 30.0
_CONNECT_SECONDS = 5.0
# What is under way is looked at again after this much of the time it has taken so far.
_PAUSE_RATIO = 0.05
_MAX_PAUSE_SECONDS = 0.002
# A peer that nobody reads from for so long is forgotten.
_IDLE_SECONDS = 600.0
# Read from a peer to see whether that can be done.
_HELLO_BYTES = 64

_MAGIC = b"KVnixl01"
_CHECKSUM = struct.Struct("<I")
# Kind of memory, device, address of block 0, bytes of a block, number of blocks.
_PLACE = struct.Struct("<BIQQQ")
# Kinds of memory, by torch's name and by nixl's.
_DEVICE_TYPES = ("cpu", "cuda")
_SEGMENTS = ("DRAM_SEG", "VRAM_SEG")


def nixl_available() -> bool:
    """Whether nixl can be imported here."""
    try:
        _import_nixl()
    except ImportError:
        return False
    return True


def _import_nixl() -> ModuleType:
    # On import, nixl configures logging, and stops it from reporting errors of its own: everybody's.
    raise_exceptions = logging.raiseExceptions
    try:
        return importlib.import_module("nixl")
    except ImportError as error:
        raise ImportError(f"nixl cannot be imported ({error}): it comes with outrider[nixl], for Linux only") from error
    finally:
        logging.raiseExceptions = raise_exceptions


class _Place(NamedTuple):
    """Where an engine's blocks lie, and how nixl reaches them."""

    kind: int
    device: int
    address: int
    block_bytes: int
    num_blocks: int
    # What the engine's nixl agent says of itself.
    agent: bytes

    def to_metadata(self) -> bytes:
        body = _PLACE.pack(*self[:-1]) + self.agent
        return _MAGIC + _CHECKSUM.pack(zlib.crc32(body)) + body

    @classmethod
    def from_metadata(cls, metadata: bytes) -> _Place:
        """Raises TransferFailed for what `to_metadata` did not make: nixl itself may crash on it."""
        start = len(_MAGIC) + _CHECKSUM.size
        checksum, body = metadata[len(_MAGIC) : start], metadata[start:]
        if not metadata.startswith(_MAGIC) or len(body) < _PLACE.size:
            raise TransferFailed("not the metadata of a nixl engine")
        if checksum != _CHECKSUM.pack(zlib.crc32(body)):
            raise TransferFailed("damaged metadata of a nixl engine")
        kind, device, address, block_bytes, num_blocks = _PLACE.unpack_from(body)
        return cls(kind, device, address, block_bytes, num_blocks, body[_PLACE.size :])


class _Remote(NamedTuple):
    """A peer's agent, as known to one of ours."""

    agent: _Agent
    name: str
    place: _Place
    # nixl's handle of the list of its blocks.
    blocks: int


class _Agent:
    """A nixl agent with a pool registered. Every call is made by one thread, and may raise TransferFailed.

    A transfer has ended when `has_ended` says so, when that raises, or when the agent is closed. To release it does
    not end it: UCX goes on with a read, whoever wants it.
    """

    def __init__(self, pool: KVPool, name: str) -> None:
        """Raises ImportError, too."""
        self._nixl = _import_nixl()
        # Held for as long as nixl knows of it.
        self._data = pool.data
        self._hello = torch.empty(_HELLO_BYTES, dtype=torch.uint8, device=pool.data.device)
        kind, device = _DEVICE_TYPES.index(pool.data.device.type), max(0, pool.data.get_device())
        place = _Place(kind, device, pool.data.data_ptr(), pool.block_num_bytes, pool.num_blocks, b"")
        config = self._nixl.nixlAgentConfig()
        config.useProgThread = True
        config.pthrDelay = _PROGRESS_MICROSECONDS
        with _nixl_errors():
            self._agent: Any = self._nixl.nixlAgent(name, config)
            self._agent.createBackend("UCX", {"engine_config": _UCX_CONFIG})
            self._register(place, self._data)
            self.place = place._replace(agent=self._agent.getLocalMD())
            # Only now: peers need not know of it.
            self._register(place, self._hello)
            self._blocks = self._list_blocks(self._nixl.NIXL_INIT_AGENT, place)

    def load(self, place: _Place) -> _Remote:
        """Makes a peer known that is not."""
        with self._unclosed():
            name = self._agent.loadRemoteMD(place.agent).decode()
            try:
                return _Remote(self, name, place, self._list_blocks(name, place))
            except BaseException:
                self._agent.invalidateRemoteMD(name)
                raise

    def forget(self, remote: _Remote) -> None:
        """No read from it may be under way."""
        with self._unclosed():
            self._agent.releasedDlistH(remote.blocks)
            self._agent.invalidateRemoteMD(remote.name)

    def start_hello(self, remote: _Remote) -> int:
        """Begins to read the peer's first bytes, into memory of no importance. Returns nixl's handle."""
        num_bytes = min(_HELLO_BYTES, self.place.block_bytes)
        with self._unclosed():
            ours = self._range(self.place, self._hello.data_ptr(), num_bytes)
            theirs = self._range(remote.place, remote.place.address, num_bytes)
            return self._post(self._agent.createXferReq(self._nixl.NIXL_READ, ours, theirs, remote.name))

    def start_read(self, remote: _Remote, reads: Sequence[BlockRead]) -> int:
        """Begins to read blocks; nixl makes one of those that are adjacent on both sides. Returns its handle."""
        ours, theirs = [read.destination for read in reads], [read.source for read in reads]
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

    @contextmanager
    def _unclosed(self) -> Iterator[None]:
        if self._agent is None:
            raise TransferFailed("the nixl agent is closed")
        with _nixl_errors():
            yield

    def _register(self, place: _Place, memory: torch.Tensor) -> None:
        region = (memory.data_ptr(), memory.numel() * memory.element_size(), place.device, "")
        self._agent.registerMem(self._nixl.nixlRegDList(self._segment(place), [region]))

    def _list_blocks(self, agent_name: str, place: _Place) -> int:
        # The first one's address, bytes of each, device, bytes from one to the next, how many.
        row = (place.address, place.block_bytes, place.device, place.block_bytes, place.num_blocks)
        rows = np.array([row], dtype=np.uint64)
        handle: int = self._agent.prepXferDlist(agent_name, self._segment(place), rows, [])
        return handle

    def _range(self, place: _Place, address: int, num_bytes: int) -> Any:
        return self._nixl.nixlXferDList(self._segment(place), [(address, num_bytes, place.device)])

    def _segment(self, place: _Place) -> Any:
        return getattr(self._nixl, _SEGMENTS[place.kind])

    def _post(self, handle: int) -> int:
        try:
            self._agent.postXferReq(handle)
        except BaseException:
            self._agent.releaseXferReq(handle)
            raise
        return handle


@contextmanager
def _nixl_errors() -> Iterator[None]:
    """Makes TransferFailed of what nixl raises, which has no type of its own."""
    try:
        yield
    except Exception as error:
        raise TransferFailed(f"nixl: {error}") from error


class _Transfer(NamedTuple):
    """What an agent has begun. `done` is done when it has ended."""

    handle: int
    began: float
    max_seconds: float
    into_pool: bool
    done: Future[None]


class _Thread:
    """The one thread that calls nixl, whose agents are not safe for more, and what is under way there."""

    def __init__(self, pool: KVPool, instance_id: str) -> None:
        """Raises ImportError, TransferFailed."""
        self._pool = pool
        self._instance_id = instance_id
        self._num_agents = 0
        self._transfers: list[_Transfer] = []
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="nixl")
        try:
            self.agent = self._executor.submit(self._new_agent).result()
        except BaseException:
            self._executor.shutdown()
            raise

    def call(self, function: Callable[[], None]) -> Future[None]:
        """Calls it on the thread. Raises TransferFailed if that is closed."""
        try:
            return self._executor.submit(function)
        except RuntimeError as error:
            raise TransferFailed("the nixl engine is closed") from error

    def transfer(self, start: Callable[[], int], max_seconds: float, *, into_pool: bool) -> Future[None]:
        """Calls `start` on the thread, and sees what it began to its end; raises TransferFailed, as the future does.

        That future cannot be cancelled. A transfer that has not ended after `max_seconds` is given up. If it may write
        `into_pool`, the agent is closed for that, and with it everything else under way.
        """
        done: Future[None] = Future()
        done.set_running_or_notify_cancel()
        self.call(partial(self._start, start, max_seconds, into_pool, done))
        return done

    def close(self) -> Future[None]:
        """Ends everything under way. Raises TransferFailed if it is closed."""
        closed = self.call(partial(self._end_all, "the nixl engine was closed"))
        self._executor.shutdown(wait=False)
        return closed

    def _new_agent(self) -> _Agent:
        if self._pool.data.is_cuda:
            torch.cuda.set_device(self._pool.data.device)
        # Peers know agents by their names.
        self._num_agents += 1
        return _Agent(self._pool, f"{self._instance_id}/{self._num_agents}")

    def _start(self, start: Callable[[], int], max_seconds: float, into_pool: bool, done: Future[None]) -> None:
        try:
            handle = start()
        except TransferFailed as error:
            done.set_exception(error)
            return
        transfer = _Transfer(handle, time.monotonic(), max_seconds, into_pool, done)
        self._transfers.append(transfer)
        self._look_at(transfer)

    def _look_at(self, transfer: _Transfer) -> None:
        if transfer.done.done():
            return
        seconds = time.monotonic() - transfer.began
        try:
            ended = self.agent.has_ended(transfer.handle)
        except TransferFailed as error:
            self._end(transfer, error)
            return
        if ended:
            self._end(transfer, None)
        elif seconds < transfer.max_seconds:
            time.sleep(min(_PAUSE_RATIO * seconds, _MAX_PAUSE_SECONDS))
            # After what others want by now.
            self.call(partial(self._look_at, transfer))
        elif transfer.into_pool:
            self._begin_anew(f"a read has not ended within {seconds:.0f} s")
        else:
            self._end(transfer, TransferFailed(f"no answer within {seconds:.0f} s"))

    def _end(self, transfer: _Transfer, error: TransferFailed | None) -> None:
        self._transfers.remove(transfer)
        with suppress(TransferFailed):
            self.agent.release(transfer.handle)
        if error is None:
            transfer.done.set_result(None)
        else:
            transfer.done.set_exception(error)

    def _end_all(self, reason: str) -> None:
        transfers, self._transfers = self._transfers, []
        for transfer in transfers:
            with suppress(TransferFailed):
                self.agent.release(transfer.handle)
        self.agent.close()
        # Not before: up to then they could still be written.
        for transfer in transfers:
            transfer.done.set_exception(TransferFailed(reason))

    def _begin_anew(self, reason: str) -> None:
        logger.error("nixl begins anew, and every read under way fails: %s", reason)
        self._end_all(reason)
        try:
            self.agent = self._new_agent()
        except TransferFailed:
            logger.exception("nixl does not begin anew: it is out of use until this worker is restarted")


class NixlPeer(TransferPeer):
    """Another worker with a nixl engine. Once a read failed, all others do: the engine has to be asked for it again."""

    def __init__(self, thread: _Thread, place: _Place) -> None:
        self._thread = thread
        self._place = place
        self._part = max(1, _PART_BYTES // place.block_bytes)
        self._connected: Future[None] | None = None
        # Set by the thread.
        self._remote: _Remote | None = None
        self._num_users = 0
        self._last_used = time.monotonic()
        self._given_up = False

    @property
    def is_unused(self) -> bool:
        idle = self._given_up or time.monotonic() - self._last_used > _IDLE_SECONDS
        return idle and self._num_users == 0

    async def connect(self) -> None:
        """Comes before all reads. Raises TransferFailed if the peer does not answer, or no direct way leads to it."""
        with self._in_use():
            if self._connected is None:
                self._connected = self._thread.transfer(self._start_hello, _CONNECT_SECONDS, into_pool=False)
            # Several may wait for it; it does not end if they are cancelled.
            await asyncio.wrap_future(self._connected)

    async def read(self, fetch_id: bytes, reads: Sequence[BlockRead]) -> None:
        with self._in_use():
            for start in range(0, len(reads), self._part):
                start_part = partial(self._start_read, reads[start : start + self._part])
                await _until_ended(self._thread.transfer(start_part, _PART_SECONDS, into_pool=True))

    def forget(self) -> None:
        """Lets go of it, which nobody may be using; later reads raise TransferFailed."""
        self._given_up = True
        self._thread.call(self._forget)

    @contextmanager
    def _in_use(self) -> Iterator[None]:
        if self._given_up:
            raise TransferFailed("this peer was given up")
        self._num_users += 1
        try:
            yield
        except TransferFailed:
            self._given_up = True
            raise
        finally:
            self._num_users -= 1
            self._last_used = time.monotonic()

    def _start_hello(self) -> int:
        # The first transfer makes the connection, for which UCX needs an answer of the peer's process; those after it
        # do not. One that the peer does not answer can be given up as long as it is not into the pool.
        self._remote = self._thread.agent.load(self._place)
        return self._remote.agent.start_hello(self._remote)

    def _start_read(self, reads: Sequence[BlockRead]) -> int:
        if self._remote is None:
            raise TransferFailed("this peer is not connected")
        return self._remote.agent.start_read(self._remote, reads)

    def _forget(self) -> None:
        if self._remote is not None:
            self._remote.agent.forget(self._remote)


async def _until_ended(transfer: Future[None]) -> None:
    """Waits for it. Cancelled, waits all the same, and raises CancelledError then."""
    waiting = asyncio.wrap_future(transfer)
    cancelled: asyncio.CancelledError | None = None
    while not waiting.done():
        try:
            await asyncio.wait([waiting])
        except asyncio.CancelledError as error:
            cancelled = error
    failure = waiting.exception()
    if cancelled is not None:
        raise cancelled
    if failure is not None:
        raise failure


class NixlEngine(TransferEngine):
    """Reads with nixl. Peers on the same machine, or in reach of its RDMA or GPU links, can be read from."""

    name: ClassVar[str] = "nixl"

    def __init__(self, pool: KVPool, instance_id: str) -> None:
        """Registers the pool, which is in RAM or on a CUDA device. No two workers may have the same `instance_id`.

        Raises ImportError without nixl, TransferFailed if it does not work here.
        """
        self._thread = _Thread(pool, instance_id)
        self._block_bytes = pool.block_num_bytes
        # By the metadata of each: that of a restarted one is new.
        self._peers: dict[bytes, NixlPeer] = {}

    @property
    def metadata(self) -> bytes:
        return self._thread.agent.place.to_metadata()

    async def peer(self, address: str, metadata: bytes) -> NixlPeer:
        place = _Place.from_metadata(metadata)
        if place.block_bytes != self._block_bytes:
            raise TransferFailed(f"its blocks have {place.block_bytes} bytes, ours {self._block_bytes}")
        for known, peer in list(self._peers.items()):
            if peer.is_unused:
                del self._peers[known]
                peer.forget()
        if metadata not in self._peers:
            self._peers[metadata] = NixlPeer(self._thread, place)
        peer = self._peers[metadata]
        await peer.connect()
        return peer

    async def close(self) -> None:
        self._peers.clear()
        with suppress(TransferFailed):
            await _until_ended(self._thread.close())
