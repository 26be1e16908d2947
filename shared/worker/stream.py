"""One router's stream on a worker: the sequences that came over it, and what goes back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from shared.engine.sequence import Sequence

Response = TypeVar("Response")


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

    async def responses(self) -> AsyncIterator[Response]:
        while (response := await self._outbox.get()) is not None:
            yield response
