"""How many requests run at once, and who is next."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from shared.rpc.errors import DeadlineExceeded, ResourceExhausted, Unavailable

_RECENT_REQUESTS = 32
# Told to clients before any request has ended.
_DEFAULT_RETRY_SECONDS = 1.0


class Admission:
    """Bounded admission that is fair between connections.

    At most `max_running` requests run; at most `max_waiting` more wait, in one line per connection, and
    the lines are served in turn, one request each. Not safe across threads: one event loop's own.
    """

    def __init__(self, max_running: int, max_waiting: int, clock: Callable[[], float] = time.monotonic) -> None:
        if max_running < 1:
            raise ValueError(f"max_running: {max_running}, must be at least 1")
        if max_waiting < 0:
            raise ValueError(f"max_waiting: {max_waiting}, must be at least 0")
        self._max_running = max_running
        self._max_waiting = max_waiting
        self._clock = clock
        self._num_running = 0
        # Connections in the order of their turns; only those with requests waiting.
        self._lines: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        self._service_seconds: deque[float] = deque(maxlen=_RECENT_REQUESTS)
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_running(self) -> int:
        return self._num_running

    @property
    def num_waiting(self) -> int:
        return sum(len(line) for line in self._lines.values())

    @asynccontextmanager
    async def slot(self, connection_id: str, timeout_seconds: float | None) -> AsyncIterator[None]:
        """Holds one of the running places for the block within, after waiting its turn.

        Raises ResourceExhausted, at once, if the line is full; DeadlineExceeded if the turn has not come
        within `timeout_seconds` (None: no limit); Unavailable while draining.
        """
        if self._draining:
            raise Unavailable("the router is draining")
        if self._num_running < self._max_running:
            self._num_running += 1
            self._idle.clear()
        else:
            await self._wait_for_turn(connection_id, timeout_seconds)
        started = self._clock()
        try:
            yield
        finally:
            self._service_seconds.append(self._clock() - started)
            self._release()

    async def drain(self) -> None:
        """Refuses all that is waiting or comes, and returns when the last running request has ended."""
        self._draining = True
        for line in self._lines.values():
            for turn in line:
                if not turn.done():
                    turn.set_exception(Unavailable("the router is draining"))
        self._lines.clear()
        await self._idle.wait()

    async def _wait_for_turn(self, connection_id: str, timeout_seconds: float | None) -> None:
        if self.num_waiting >= self._max_waiting:
            self._make_room(connection_id)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._lines.setdefault(connection_id, deque()).append(turn)
        try:
            async with asyncio.timeout(timeout_seconds):
                await turn
        except TimeoutError as error:
            self._leave(connection_id, turn)
            raise DeadlineExceeded(f"no place to run within {timeout_seconds:.3f} s") from error
        except asyncio.CancelledError:
            self._leave(connection_id, turn)
            raise

    def _make_room(self, connection_id: str) -> None:
        """Turns away the last of the longest line, if that is longer than the newcomer's would be, else the newcomer.

        So a connection that floods the queue does not shut out the others.
        """
        full = ResourceExhausted(
            f"{self._num_running} requests running and {self.num_waiting} waiting, the most allowed",
            retry_after_seconds=self._drain_seconds(),
        )
        num_own = len(self._lines.get(connection_id, ()))
        longest = max(self._lines, key=lambda id: len(self._lines[id]), default=connection_id)
        if len(self._lines.get(longest, ())) <= num_own + 1:
            raise full
        turn = self._lines[longest].pop()
        if not turn.done():
            turn.set_exception(full)

    def _leave(self, connection_id: str, turn: asyncio.Future[None]) -> None:
        """Gives up a turn that nobody waits for any more: its place in line, or the slot it was just given."""
        line = self._lines.get(connection_id)
        if line is not None and turn in line:
            line.remove(turn)
            if not line:
                del self._lines[connection_id]
        elif not turn.cancelled() and turn.exception() is None:
            self._release()

    def _release(self) -> None:
        """Hands a slot to the next in turn, or frees it."""
        while self._lines:
            connection_id, line = self._lines.popitem(last=False)
            turn = line.popleft()
            if line:
                # Behind all others: this connection has had its turn.
                self._lines[connection_id] = line
            # One that was cancelled stays in line until its task has run again.
            if not turn.done():
                turn.set_result(None)
                return
        self._num_running -= 1
        if self._num_running == 0:
            self._idle.set()

    def _drain_seconds(self) -> float:
        """When those now waiting will have been served, by recent service times (Little's law)."""
        if not self._service_seconds:
            return _DEFAULT_RETRY_SECONDS
        mean = sum(self._service_seconds) / len(self._service_seconds)
        return mean * max(1, self.num_waiting) / self._max_running
