"""A request's output on its way to the client, who may read slower than it is generated, or not at all."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

from outrider.v1 import inference_pb2

from shared.rpc.errors import Aborted

Write = Callable[[inference_pb2.GenerateResponse], Awaitable[None]]

# Far behind what a client that reads at all can fall back: gRPC and the network hold some megabytes of their own,
# and these are 16,000 chunks of plain text, or 1,000 steps of 16 sequences with 20 log-probabilities each.
_MAX_QUEUED_BYTES = 4 << 20
# In memory a chunk takes about this much besides its bytes.
_CHUNK_BYTES = 256
# Long enough for a client that was put to sleep for a moment.
_WRITE_SECONDS = 60.0


class ChunkQueue:
    """Generation puts chunks in and never waits; `write_to` takes them out at the client's pace.

    The bytes within are bounded, and the time that one write takes. Beyond either the request is over: the client
    gets ABORTED, and what is queued is dropped. ABORTED and not RESOURCE_EXHAUSTED, since there is room for
    the request: the same call may be made again at once by a client that then reads.
    """

    def __init__(self) -> None:
        self._max_bytes, self._write_seconds = _MAX_QUEUED_BYTES, _WRITE_SECONDS
        self._chunks: deque[inference_pb2.GenerateResponse] = deque()
        self._num_bytes = 0
        self._ended = False
        self._overflowed = False
        self._changed = asyncio.Event()
        # Of all writes, while there are any.
        self._limit: asyncio.Timeout | None = None
        # When the write under way began, and when it is looked at next whether that is too long ago: a timer for each
        # would take a good part of what a write takes.
        self._write_began: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    def put(self, chunk: inference_pb2.GenerateResponse) -> None:
        """Queues a chunk. One that does not fit ends `write_to`, and is dropped with all others."""
        if self._overflowed:
            return
        self._chunks.append(chunk)
        self._num_bytes += _size(chunk)
        self._changed.set()
        if self._num_bytes > self._max_bytes:
            self._overflowed = True
            self._chunks.clear()
            if self._write_began is not None:
                self._stop_writing()

    def end(self) -> None:
        """Nothing more is put in."""
        self._ended = True
        self._changed.set()

    async def write_to(self, write: Write) -> None:
        """Writes every chunk, and returns behind the last. Raises Aborted when the client does not keep up."""
        try:
            async with asyncio.timeout(None) as self._limit:
                self._look()
                await self._write_all(write)
        except TimeoutError as error:
            assert self._limit is not None
            if not self._limit.expired():
                raise
            if not self._overflowed:
                self._chunks.clear()
                raise Aborted(f"the client has read nothing for {self._write_seconds:g} s") from error
        finally:
            if self._timer is not None:
                self._timer.cancel()
        if self._overflowed:
            raise Aborted(f"the client is too slow: more than {self._max_bytes} bytes wait to be read")

    async def _write_all(self, write: Write) -> None:
        """Until there is no more, or it overflows."""
        clock = asyncio.get_running_loop().time
        while not self._overflowed:
            if self._chunks:
                chunk = self._chunks.popleft()
                self._write_began = clock()
                try:
                    await write(chunk)
                finally:
                    self._write_began = None
                self._num_bytes -= _size(chunk)
            elif self._ended:
                return
            else:
                self._changed.clear()
                await self._changed.wait()
                # What a worker is to do next is written first: it waits for that, and a client would not notice.
                await asyncio.sleep(0)

    def _look(self) -> None:
        """Ends a write that has taken too long, and looks again when the one under way will have, or the next might."""
        loop = asyncio.get_running_loop()
        began, now = self._write_began, loop.time()
        if began is not None and now - began >= self._write_seconds:
            self._stop_writing()
            return
        self._timer = loop.call_at((now if began is None else began) + self._write_seconds, self._look)

    def _stop_writing(self) -> None:
        if self._limit is not None and not self._limit.expired():
            self._limit.reschedule(asyncio.get_running_loop().time())


def _size(chunk: inference_pb2.GenerateResponse) -> int:
    return chunk.ByteSize() + _CHUNK_BYTES
