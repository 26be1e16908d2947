"""A worker's long-lived stream, kept open: connect, dispatch, and connect again."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Final, Generic, TypeVar

import grpc
from google.protobuf.message import Message
from outrider.v1 import worker_pb2
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, wait_random_exponential

from services.router.workers.description import check_description
from services.router.workers.outbox import Outbox
from shared.policy.step_costs import StepCosts
from shared.security.identity import PLAIN, Identity, Service
from shared.settings import StartupError

logger = logging.getLogger(__name__)

Operation = TypeVar("Operation", bound=Message)
Request = TypeVar("Request")
Response = TypeVar("Response")

WORKER_STATES: Final = ("serving", "failing", "draining", "away")
"""How a worker can be: failing is one that is left alone for a while."""

# It is answered between two steps of the worker's engine.
INFO_TIMEOUT_SECONDS = 30.0
# Between the end of a stream and the next attempt: a worker whose streams end at once is not hammered.
_RECONNECT_SECONDS = 0.1


class WorkerRefused(Exception):
    """A worker has another model or tokenizer than those in service, or says of itself what cannot be; it is asked
    again later."""


class WorkerConnection(ABC, Generic[Operation, Request, Response]):
    """Subclasses say what is sent and what to do with what comes.

    `info` is the worker's own description while it is connected, else None; `epoch` counts connections,
    so that what belonged to an earlier one can be told; `costs` is what its steps cost.
    """

    service: ClassVar[Service]

    def __init__(
        self,
        address: str,
        check: Callable[[worker_pb2.WorkerInfo], None],
        changed: asyncio.Condition,
        identity: Identity = PLAIN,
    ) -> None:
        """`check` sees what the worker says of itself before it is used. The StartupError it raises ends
        `run` the first time; a worker that was right once and comes back wrong is refused until it is right
        again, as is one for which `check` raises WorkerRefused. `changed` is notified when the worker is
        connected, drains or is lost."""
        self.address = address
        self._identity = identity
        self._check = check
        self._changed = changed
        self.info: worker_pb2.WorkerInfo | None = None
        self.epoch = 0
        self.costs = StepCosts([(1, 1.0)])
        self._outbox = Outbox(self._release_operation)
        self._wake_writer = asyncio.Event()
        self._call: Any = None

    @property
    def connected(self) -> bool:
        return self.info is not None

    @property
    def state(self) -> str:
        """One of WORKER_STATES."""
        return "serving" if self.connected else "away"

    async def run(self) -> None:
        """Keeps the stream open until cancelled."""
        while True:
            async with await self._reach() as channel:
                try:
                    await self._converse(channel)
                except grpc.aio.AioRpcError as error:
                    logger.warning("worker lost", extra={"address": self.address, "status": error.code().name})
                else:
                    logger.info("worker closed its stream", extra={"address": self.address})
                finally:
                    self._outbox.clear()
                    self._on_lost()
                    await self._announce(None)
            await asyncio.sleep(_RECONNECT_SECONDS)

    def send(self, operation: Operation, sequence_ids: Sequence[int], *, begins: bool = False) -> None:
        """Has the worker told, behind all that it was told before; `begins` says that it learns of these sequences
        by this. Raises Internal if that is more than a message can carry."""
        self._outbox.add(operation, sequence_ids, begins=begins)
        self._wake_writer.set()

    def send_release(self, sequence_id: int) -> None:
        """Has a sequence released, and what was not yet sent of it forgotten."""
        self._outbox.release(sequence_id)
        self._wake_writer.set()

    def hang_up(self) -> None:
        """Gives up on a worker that does not answer: its stream ends, and `run` connects again when it can."""
        if self._call is not None:
            self._call.cancel()

    async def _reach(self) -> grpc.aio.Channel:
        """A channel to the worker, which was found and accepted."""
        # Endlessly: a worker that is away may come back, and until then requests go elsewhere.
        async for attempt in AsyncRetrying(
            retry=retry_if_exception_type((grpc.aio.AioRpcError, WorkerRefused)),
            wait=wait_random_exponential(multiplier=0.05, max=1.0),
            before_sleep=self._after_failure,
        ):
            with attempt:
                # Another each time: certificates may have been replaced since.
                channel = self._identity.connect(self.address, self.service)
                try:
                    await self._accept(await self._get_info(channel))
                except BaseException:
                    await channel.close()
                    raise
        return channel

    @abstractmethod
    def _new_request(self, operations: Sequence[Operation]) -> Request: ...

    @abstractmethod
    def _release_operation(self, sequence_id: int) -> Operation: ...

    @abstractmethod
    async def _get_info(self, channel: grpc.aio.Channel) -> worker_pb2.WorkerInfo:
        """Asks the worker for its description."""

    @abstractmethod
    def _open(self, channel: grpc.aio.Channel) -> Any:
        """Opens the stream."""

    @abstractmethod
    def _on_response(self, response: Response) -> None: ...

    @abstractmethod
    def _on_lost(self) -> None:
        """The stream is gone, with everything that was on it."""

    async def _accept(self, info: worker_pb2.WorkerInfo) -> None:
        try:
            check_description(info)
        except ValueError as error:
            raise WorkerRefused(str(error)) from error
        try:
            self._check(info)
        except StartupError as error:
            if self.epoch == 0:
                raise
            raise WorkerRefused(str(error)) from error
        self.epoch += 1
        self._outbox.clear()
        self.costs = step_costs(info)
        await self._announce(info)
        logger.info("worker connected", extra={"address": self.address, "instance": info.instance_id})

    def _after_failure(self, state: RetryCallState) -> None:
        """Says once, not at every attempt, that a worker cannot be reached."""
        if state.attempt_number == 1 and state.outcome is not None:
            reason = state.outcome.exception()
            shown = reason.code().name if isinstance(reason, grpc.aio.AioRpcError) else str(reason)
            logger.warning("worker not reached; trying on", extra={"address": self.address, "reason": shown})

    async def _announce(self, info: worker_pb2.WorkerInfo | None) -> None:
        self.info = info
        await self._notify()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _converse(self, channel: grpc.aio.Channel) -> None:
        call = self._call = self._open(channel)
        writer = asyncio.create_task(self._write(call))
        try:
            async for response in call:
                self._on_response(response)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # The call was cancelled, not this task: we hung up.
        finally:
            self._call = None
            call.cancel()
            writer.cancel()
            # Unlike `suppress(CancelledError): await writer` this never swallows a cancellation of our own.
            await asyncio.gather(writer, return_exceptions=True)

    async def _write(self, call: Any) -> None:
        while True:
            await self._wake_writer.wait()
            self._wake_writer.clear()
            # Whatever is added while a write waits goes out in the next ones.
            while operations := self._outbox.take():
                await call.write(self._new_request(operations))


def step_costs(info: worker_pb2.WorkerInfo) -> StepCosts:
    """What a worker measured of itself at warm-up."""
    return StepCosts([(cost.num_tokens, cost.seconds) for cost in info.step_costs])
