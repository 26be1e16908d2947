"""The thread an engine runs on: requests in between steps, outcomes out after them."""

from __future__ import annotations

import asyncio
import logging
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

from shared.engine.engine import Engine, StepOutcome

logger = logging.getLogger(__name__)

T = TypeVar("T")

# How often one that waits for an answer looks whether anybody is there to give it.
_LOOK_SECONDS = 1.0
# What requests may take between two steps, all that wait there: a flood of them must not hold up the next.
_REQUESTS_SECONDS = 0.05
# What a step gets to end in when the thread is told to.
_STOP_SECONDS = 10.0


class EngineEnded(Exception):
    """The engine's thread has ended, and answers nothing any more."""


class EngineLoop:
    """Steps the engine while it has work, and sleeps while it has none.

    `on_step` is called on the engine's thread after every step, before the next. A broken engine, or any error
    outside a step's own computation (a broken invariant), ends the thread: it is logged, and `on_crash` is called.
    """

    def __init__(
        self,
        engine: Engine,
        on_step: Callable[[StepOutcome], None],
        on_crash: Callable[[], None],
        seconds_to_wait: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """`seconds_to_wait`: how long the next step should wait for requests that are on their way."""
        self.engine = engine
        self._on_step = on_step
        self._on_crash = on_crash
        self._seconds_to_wait = seconds_to_wait
        self._requests: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._num_turns = 0
        self._busy = False

    def start(self) -> None:
        self._thread.start()

    def submit(self, request: Callable[[], None]) -> None:
        """Has `request` run on the engine's thread before its next step, where it may touch the scheduler."""
        self._requests.put(request)

    async def ask(self, question: Callable[[], T]) -> T:
        """What `question` returns, or raises, on the engine's thread, as with `submit`.

        It runs whether or not this is cancelled before. Raises EngineEnded if the thread ends, or has, before it ran.
        """
        asyncio_loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = asyncio_loop.create_future()

        def settle(set_outcome: Callable[[Any], None], outcome: object) -> None:
            if not answer.done():  # by cancellation
                set_outcome(outcome)

        def run() -> None:
            try:
                result = question()
            except Exception as error:
                asyncio_loop.call_soon_threadsafe(settle, answer.set_exception, error)
            else:
                asyncio_loop.call_soon_threadsafe(settle, answer.set_result, result)

        self.submit(run)
        try:
            alive = True
            while not answer.done() and alive:
                # What it said last is here one look after its end.
                alive = self._thread.is_alive()
                await asyncio.wait([answer], timeout=_LOOK_SECONDS if alive else 0.0)
            if answer.done():
                return answer.result()
        finally:
            answer.cancel()
        raise EngineEnded("the engine's thread has ended")

    def stop(self) -> None:
        """Ends the thread after the step it is in. One that hangs is left behind: it ends with the process."""
        self._requests.put(None)
        self._thread.join(_STOP_SECONDS)
        if self._thread.is_alive():
            logger.warning("the engine's thread still runs %g s after it was told to end", _STOP_SECONDS)

    @property
    def turn(self) -> int | None:
        """Which turn (requests, then a step) the thread is in, from 1; None while it waits for work."""
        return self._num_turns if self._busy else None

    def stack(self) -> str:
        """Where the thread is now, as in a traceback."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        return "".join(traceback.format_stack(frame)) if frame is not None else "the thread has ended"

    def _run(self) -> None:
        try:
            self._serve()
        except Exception:
            logger.critical("the engine's thread ended by an error", exc_info=True)
            self._on_crash()
        finally:
            self._busy = False

    def _serve(self) -> None:
        idle, is_checked = False, False
        while True:
            # Everything that has come in meanwhile joins the same step; with no work, wait for some.
            self._busy = not idle
            request = self._requests.get() if idle else None
            self._num_turns += 1
            self._busy = True
            if idle and request is None:
                return
            if request is not None:
                request()
            wait = 0.0
            # Unless they take so long that those who wait for the step would never get it.
            ends = time.monotonic() + _REQUESTS_SECONDS
            while (not self._requests.empty() and time.monotonic() < ends) or (
                self._requests.empty() and (wait := self._seconds_to_wait()) > 0
            ):
                try:
                    request = self._requests.get(timeout=wait)
                except queue.Empty:
                    continue
                if request is None:
                    return
                request()
            outcome = self.engine.step()
            if outcome is not None:
                self._on_step(outcome)
                is_checked = False
            # Where all wait for their owners, another step would find that out, and hold up who is to tell them.
            idle = outcome is None or not self.engine.scheduler.has_work
            if idle and not is_checked and self.engine.scheduler.is_empty and self._requests.empty():
                # Not whenever there is a pause: it walks through every block.
                self.engine.scheduler.check()
                is_checked = True
