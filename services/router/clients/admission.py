"""How many sequences run at once, and who is next."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from shared.rpc.errors import DeadlineExceeded, ResourceExhausted, Unavailable

_RECENT_REQUESTS = 32
# Told to clients before any request has ended.
_DEFAULT_RETRY_SECONDS = 1.0


@dataclass(eq=False, slots=True)
class _Turn:
    """A request in line; `come` is done when it may run, or never will."""

    weight: int
    come: asyncio.Future[None]


@dataclass(eq=False, slots=True)
class _Line:
    """What waits of one tenant or connection, first come first; `credit` is what it has saved for its next request."""

    turns: deque[_Turn] = field(default_factory=deque)
    credit: int = 0


class Admission:
    """Bounded admission that is fair between lines: tenants, or connections.

    Requests weigh as many of the `max_running` places as they have sequences; one that weighs more than there
    are takes them all, and so runs alone. At most `max_waiting` requests wait, in one line each for whom they
    come from. Lines are served in turn by weight (deficit round robin, Shreedhar and Varghese 1995, with a
    quantum of 1): a line whose request weighs 16 gets its place when others have had 16 of weight 1. Who is
    next and does not fit is waited for, so that light requests do not pass a heavy one for ever.

    Not safe across threads: one event loop's own.
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
        # Lines in the order of their turns; only those with requests waiting.
        self._lines: OrderedDict[str, _Line] = OrderedDict()
        self._service_seconds: deque[float] = deque(maxlen=_RECENT_REQUESTS)
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_running(self) -> int:
        """Places taken: the weight of all that runs."""
        return self._num_running

    @property
    def num_waiting(self) -> int:
        """Requests in line."""
        # The metrics' thread asks as well.
        return sum(len(line.turns) for line in list(self._lines.values()))

    @asynccontextmanager
    async def slot(
        self, line_id: str, timeout_seconds: float | None, weight: int = 1
    ) -> AsyncIterator[Callable[[], None]]:
        """Holds `weight` places for the block within, after waiting its turn; what it yields gives them back early.

        Raises ResourceExhausted, at once, if the line is full; DeadlineExceeded if the turn has not come
        within `timeout_seconds` (None: no limit); Unavailable while draining.
        """
        if self._draining:
            raise Unavailable("the router is draining")
        weight = min(weight, self._max_running)
        if not self._lines and self._num_running + weight <= self._max_running:
            self._take(weight)
        else:
            await self._wait_for_turn(line_id, weight, timeout_seconds)
        started = self._clock()
        held = True

        def release() -> None:
            nonlocal held
            if held:
                held = False
                self._service_seconds.append(self._clock() - started)
                self._release(weight)

        try:
            yield release
        finally:
            release()

    async def drain(self) -> None:
        """Refuses all that is waiting or comes, and returns when the last running request has ended."""
        self._draining = True
        for line in self._lines.values():
            for turn in line.turns:
                if not turn.come.done():
                    turn.come.set_exception(Unavailable("the router is draining"))
        self._lines.clear()
        await self._idle.wait()

    async def _wait_for_turn(self, line_id: str, weight: int, timeout_seconds: float | None) -> None:
        if self.num_waiting >= self._max_waiting:
            self._make_room(line_id)
        turn = _Turn(weight, asyncio.get_running_loop().create_future())
        self._lines.setdefault(line_id, _Line()).turns.append(turn)
        try:
            async with asyncio.timeout(timeout_seconds):
                await turn.come
        except TimeoutError as error:
            self._leave(line_id, turn)
            raise DeadlineExceeded(f"no place to run within {timeout_seconds:.3f} s") from error
        except asyncio.CancelledError:
            self._leave(line_id, turn)
            raise

    def _make_room(self, line_id: str) -> None:
        """Turns away the last of the longest line, if that is longer than the newcomer's would be, else the newcomer.

        So one who floods the queue does not shut out the others.
        """
        full = ResourceExhausted(
            f"{self._num_running} of {self._max_running} sequences running and "
            f"{self.num_waiting} of {self._max_waiting} requests waiting",
            retry_after_seconds=self._drain_seconds(),
        )
        longest = max(self._lines.values(), key=lambda line: len(line.turns), default=_Line())
        own = self._lines.get(line_id, _Line())
        if len(longest.turns) <= len(own.turns) + 1:
            raise full
        # It has another before it: its line does not end, and neither is it the one next in turn.
        turn = longest.turns.pop()
        if not turn.come.done():
            turn.come.set_exception(full)

    def _leave(self, line_id: str, turn: _Turn) -> None:
        """Gives up a turn that nobody waits for any more: its place in line, or the places it was just given."""
        line = self._lines.get(line_id)
        if line is not None and turn in line.turns:
            line.turns.remove(turn)
            if not line.turns:
                del self._lines[line_id]
            # It may have been the one that the others waited behind.
            self._admit_next()
        elif not turn.come.cancelled() and turn.come.exception() is None:
            self._release(turn.weight)

    def _take(self, weight: int) -> None:
        self._num_running += weight
        self._idle.clear()

    def _release(self, weight: int) -> None:
        self._num_running -= weight
        self._admit_next()
        if self._num_running == 0:
            self._idle.set()

    def _admit_next(self) -> None:
        """Gives what is free to those next in turn, as far as it goes."""
        while self._lines:
            line_id, line = next(iter(self._lines.items()))
            turn = line.turns[0]
            # One that was cancelled stays in line until its task has run again.
            if not turn.come.done():
                if line.credit < turn.weight:
                    line.credit += 1
                if line.credit < turn.weight:
                    self._lines.move_to_end(line_id)
                    continue
                if self._num_running + turn.weight > self._max_running:
                    return
                line.credit -= turn.weight
                self._take(turn.weight)
                turn.come.set_result(None)
                # Behind all others: this line has had its turn.
                self._lines.move_to_end(line_id)
            line.turns.popleft()
            if not line.turns:
                del self._lines[line_id]

    def _drain_seconds(self) -> float:
        """When those now waiting will have been served, by recent service times (Little's law)."""
        if not self._service_seconds:
            return _DEFAULT_RETRY_SECONDS
        mean = sum(self._service_seconds) / len(self._service_seconds)
        waiting = sum(turn.weight for line in self._lines.values() for turn in line.turns)
        return mean * max(1, waiting) / self._max_running
