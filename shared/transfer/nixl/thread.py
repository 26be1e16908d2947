"""The one thread that calls nixl, whose agents are not safe for more."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import torch

from shared.engine.kv_pool import KVPool
from shared.transfer.engine import TransferFailed
from shared.transfer.nixl.agent import Agent

logger = logging.getLogger(__name__)

# What is under way is looked at again after this much of the time it has taken so far.
_PAUSE_RATIO = 0.05
_MAX_PAUSE_SECONDS = 0.002


class _Transfer(NamedTuple):
    """What an agent has begun. `done` is done when it has ended."""

    handle: int
    began: float
    max_seconds: float
    into_pool: bool
    done: Future[None]


class NixlThread:
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

    def _new_agent(self) -> Agent:
        if self._pool.data.is_cuda:
            torch.cuda.set_device(self._pool.data.device)
        # Peers know agents by their names.
        self._num_agents += 1
        return Agent(self._pool, f"{self._instance_id}/{self._num_agents}")

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
