"""The one thread that calls nixl, whose agents are not safe for more."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch

from shared.engine.kv_pool import KVPool
from shared.transfer.engine import TransferFailed
from shared.transfer.nixl.agent import Agent, Begun

logger = logging.getLogger(__name__)

# What is under way is looked at again after this much of the time it has taken so far.
_PAUSE_RATIO = 0.05
_MAX_PAUSE_SECONDS = 0.002


class Done(asyncio.Future[TransferFailed | None]):
    """Done when a transfer has ended; its result is why that failed.

    Who is cancelled while awaiting it waits to the end all the same, and gets CancelledError then.
    """

    def cancel(self, msg: Any | None = None) -> bool:
        return False


class _Transfer(NamedTuple):
    """What an agent has begun. `done` is done when it has ended."""

    handle: int
    began: float
    max_seconds: float
    into_pool: bool
    done: Done


class NixlThread:
    """The one thread that calls nixl, whose agents are not safe for more, and what is under way there."""

    def __init__(self, pool: KVPool, instance_id: str) -> None:
        """Raises ImportError, TransferFailed."""
        self._pool = pool
        self._instance_id = instance_id
        self._num_agents = 0
        self._transfers: list[_Transfer] = []
        # Not an executor, whose own work per call is a tenth of what a prompt's read takes.
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._closed = False
        first: Future[Agent] = Future()
        threading.Thread(target=self._run, args=(first,), name="nixl", daemon=True).start()
        self.agent = first.result()

    def call(self, function: Callable[[], None]) -> None:
        """Calls it on the thread. Raises TransferFailed if that is closed."""
        if self._closed:
            raise TransferFailed("the nixl engine is closed")
        self._calls.put(function)

    def transfer(self, start: Callable[[], Begun], max_seconds: float, *, into_pool: bool) -> Done:
        """Calls `start` on the thread, and sees what it began to its end. Raises TransferFailed if it is closed.

        A transfer that has not ended after `max_seconds` is given up. If it may write `into_pool`, the agent is closed
        for that, and with it everything else under way.
        """
        done = Done()
        self.call(partial(self._start, start, max_seconds, into_pool, done))
        return done

    def close(self) -> Done:
        """Ends everything under way. Raises TransferFailed if it is closed."""
        closed = Done()
        self.call(partial(self._close, closed))
        self._closed = True
        return closed

    def _run(self, first: Future[Agent]) -> None:
        try:
            first.set_result(self._new_agent())
        except BaseException as error:
            first.set_exception(error)
            return
        while (call := self._calls.get()) is not None:
            try:
                call()
            except Exception:
                # A bug: but what else is under way has to end.
                logger.exception("a call on nixl's thread failed")

    def _close(self, closed: Done) -> None:
        self._end_all("the nixl engine was closed")
        self._calls.put(None)
        _tell(closed, None)

    def _new_agent(self) -> Agent:
        if self._pool.data.is_cuda:
            torch.cuda.set_device(self._pool.data.device)
        # Peers know agents by their names.
        self._num_agents += 1
        return Agent(self._pool, f"{self._instance_id}/{self._num_agents}")

    def _start(self, start: Callable[[], Begun], max_seconds: float, into_pool: bool, done: Done) -> None:
        try:
            begun = start()
        except TransferFailed as error:
            _tell(done, error)
            return
        if begun.has_ended:
            self._end(begun.handle, done, None)
            return
        transfer = _Transfer(begun.handle, time.monotonic(), max_seconds, into_pool, done)
        self._transfers.append(transfer)
        self._look_at(transfer)

    def _look_at(self, transfer: _Transfer) -> None:
        if transfer not in self._transfers:
            return
        seconds = time.monotonic() - transfer.began
        error = None
        try:
            ended = self.agent.has_ended(transfer.handle)
        except TransferFailed as failure:
            ended, error = True, failure
        if not ended and seconds < transfer.max_seconds:
            time.sleep(min(_PAUSE_RATIO * seconds, _MAX_PAUSE_SECONDS))
            # After what others want by now.
            self._calls.put(partial(self._look_at, transfer))
        elif not ended and transfer.into_pool:
            self._begin_anew(f"a read has not ended within {seconds:.0f} s")
        else:
            if not ended:
                error = TransferFailed(f"no answer within {seconds:.0f} s")
            self._transfers.remove(transfer)
            self._end(transfer.handle, transfer.done, error)

    def _end(self, handle: int, done: Done, error: TransferFailed | None) -> None:
        # Who waits wakes up meanwhile.
        _tell(done, error)
        with suppress(TransferFailed):
            self.agent.release(handle)

    def _end_all(self, reason: str) -> None:
        transfers, self._transfers = self._transfers, []
        for transfer in transfers:
            with suppress(TransferFailed):
                self.agent.release(transfer.handle)
        self.agent.close()
        # Not before: up to then they could still be written.
        for transfer in transfers:
            _tell(transfer.done, TransferFailed(reason))

    def _begin_anew(self, reason: str) -> None:
        logger.error("nixl begins anew, and every read under way fails: %s", reason)
        self._end_all(reason)
        try:
            self.agent = self._new_agent()
        except TransferFailed:
            logger.exception("nixl does not begin anew: it is out of use until this worker is restarted")


def _tell(done: Done, error: TransferFailed | None) -> None:
    # Closed, the loop has nobody left who waits.
    with suppress(RuntimeError):
        done.get_loop().call_soon_threadsafe(done.set_result, error)
