"""One router's stream on a worker: the sequences that came over it, and what goes back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from shared.engine.sequence import Sequence

Response = TypeVar("Response")

# A router writes once a step, and reads what comes: more than these is a flood, which is to wait where it comes from.
_MAX_UNHANDLED = 16
_MAX_UNSENT = 1024
_LOOK_SECONDS = 0.01


@dataclass(eq=False)
class Lane(Generic[Response]):
    """A sequence's way back to its router. Belongs to the engine's thread.

    `traceparent` is that of the router's latest word on it; `began_ns` when it came (Unix nanoseconds).
    """

    stream: RouterStream[Response]
    sequence_id: int
    sequence: Sequence
    traceparent: str
    began_ns: int = field(default_factory=time.time_ns)
    answered: bool = False


@dataclass(eq=False)
class RouterStream(Generic[Response]):
    """`lanes` belongs to the engine's thread, where alone it is read and changed."""

    lanes: dict[int, Lane[Response]] = field(default_factory=dict)
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    _outbox: asyncio.Queue[Response | None] = field(default_factory=asyncio.Queue)
    # Each is counted by one thread: the first by the event loop's, the second by the engine's.
    num_taken: int = 0
    num_handled: int = 0

    def send(self, response: Response) -> None:
        """Queues a response; from any thread."""
        self._loop.call_soon_threadsafe(self._outbox.put_nowait, response)

    def send_sign_of_life(self, response: Response) -> None:
        """Queues a response that says nothing new, unless one that is still unsent does as well; from any thread."""
        self._loop.call_soon_threadsafe(self._put_if_empty, response)

    def end(self) -> None:
        """Ends `responses` behind what is queued; from any thread."""
        self._loop.call_soon_threadsafe(self._outbox.put_nowait, None)

    def _put_if_empty(self, response: Response) -> None:
        if self._outbox.empty():
            self._outbox.put_nowait(response)

    async def room(self) -> None:
        """Returns when there is room for one more message of the router's: when what came before it has been handled,
        and what was answered taken, but for so many."""
        # Not an event, which would cost every message a word from thread to thread.
        while self.num_taken - self.num_handled >= _MAX_UNHANDLED or self._outbox.qsize() >= _MAX_UNSENT:  # noqa: ASYNC110
            await asyncio.sleep(_LOOK_SECONDS)

    async def responses(self) -> AsyncIterator[Response]:
        while (response := await self._outbox.get()) is not None:
            yield response
