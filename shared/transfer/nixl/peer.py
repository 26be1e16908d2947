"""Another worker with a nixl engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial

from shared.transfer.engine import BlockRead, TransferFailed, TransferPeer
from shared.transfer.nixl.agent import Begun, Remote
from shared.transfer.nixl.place import Place
from shared.transfer.nixl.thread import Done, NixlThread

# A read is done in parts of this size. Between two of them it can be cancelled, and other reads have their turn.
_PART_BYTES = 256 * 2**20
# UCX itself gives up sooner on a peer that is gone.
_PART_SECONDS = 30.0
_CONNECT_SECONDS = 5.0
# A peer that nobody reads from for so long is forgotten.
_IDLE_SECONDS = 600.0


class NixlPeer(TransferPeer):
    """Another worker with a nixl engine. Once a read failed, all others do: the engine has to be asked for it again."""

    def __init__(self, thread: NixlThread, place: Place) -> None:
        self._thread = thread
        self._place = place
        self._part = max(1, _PART_BYTES // place.block_bytes)
        self._connected: Done | None = None
        # Set by the thread.
        self._remote: Remote | None = None
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
            failure = await asyncio.shield(self._connected)
            if failure is not None:
                raise failure

    async def read(self, fetch_id: bytes, reads: Sequence[BlockRead]) -> None:
        with self._in_use():
            for start in range(0, len(reads), self._part):
                start_part = partial(self._start_read, reads[start : start + self._part])
                failure = await self._thread.transfer(start_part, _PART_SECONDS, into_pool=True)
                if failure is not None:
                    raise failure

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

    def _start_hello(self) -> Begun:
        # The first transfer makes the connection, for which UCX needs an answer of the peer's process; those after it
        # do not. One that the peer does not answer can be given up as long as it is not into the pool.
        self._remote = self._thread.agent.load(self._place)
        return self._remote.agent.start_hello(self._remote)

    def _start_read(self, reads: Sequence[BlockRead]) -> Begun:
        if self._remote is None:
            raise TransferFailed("this peer is not connected")
        return self._remote.agent.start_read(self._remote, reads)

    def _forget(self) -> None:
        if self._remote is not None:
            with suppress(TransferFailed):
                self._remote.agent.forget(self._remote)
