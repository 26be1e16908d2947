"""The half of a worker's servicer that draft and target share: streams, info, state, drain."""

from __future__ import annotations

import asyncio
import logging
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any, Generic, TypeVar

import grpc
from outrider.v1 import worker_pb2

from shared.engine.engine import Engine, StepOutcome
from shared.engine.loop import EngineEnded, EngineLoop
from shared.engine.sequence import Sequence
from shared.rpc.errors import OutriderError, ResourceExhausted, Unavailable
from shared.telemetry.metrics import WorkerMetrics
from shared.telemetry.tracing import Telemetry
from shared.worker.stream import Lane, RouterStream

logger = logging.getLogger(__name__)

# Of routers, each of which has one, but for those that are gone and not yet missed.
_MAX_STREAMS = 256

Request = TypeVar("Request")
Response = TypeVar("Response")
T = TypeVar("T")


class WorkerServicer(ABC, Generic[Request, Response]):
    """Serves streams of routers from one engine, once `attach` has brought it.

    Methods named `_on_…` run on the engine's thread and alone touch lanes and scheduler.
    """

    def __init__(self, telemetry: Telemetry, tokenizer_fingerprint: str) -> None:
        self.instance_id = uuid.uuid4().hex
        self.telemetry = telemetry
        self._tokenizer_fingerprint = tokenizer_fingerprint
        self._engine_loop: EngineLoop | None = None
        self._metrics: WorkerMetrics | None = None
        self._streams: set[RouterStream[Response]] = set()
        self._lanes: dict[Sequence, Lane[Response]] = {}
        self._draining = False
        self._asyncio_loop = asyncio.get_running_loop()
        self._without_lanes = asyncio.Event()
        self._without_lanes.set()

    @property
    def engine(self) -> Engine:
        """Raises Unavailable while the model is not loaded."""
        return self.engine_loop.engine

    @property
    def metrics(self) -> WorkerMetrics:
        """Raises Unavailable while the model is not loaded."""
        if self._metrics is None:
            raise Unavailable("the model is still being loaded")
        return self._metrics

    @property
    def engine_loop(self) -> EngineLoop:
        """Raises Unavailable while the model is not loaded."""
        if self._engine_loop is None:
            raise Unavailable("the model is still being loaded")
        return self._engine_loop

    def attach(self, engine: Engine, on_crash: Callable[[], None]) -> EngineLoop:
        """Starts serving from a warmed-up engine; `on_crash` is called if its thread ends by an error."""
        self._metrics = WorkerMetrics(self.telemetry.meter, engine.model.name)
        self._metrics.watch_engine(lambda: _block_states(engine), lambda: _sequence_states(engine))
        self._metrics.watch_pressure(lambda: engine.blocks.num_restored, lambda: engine.scheduler.num_preempted)
        self._engine_loop = EngineLoop(engine, self._on_step, on_crash, self._seconds_to_wait)
        self._engine_loop.start()
        return self._engine_loop

    def close(self) -> None:
        """Stops the engine's thread."""
        if self._engine_loop is not None:
            self._engine_loop.stop()

    def end_streams(self) -> None:
        """Ends every router's stream behind what was answered."""
        for stream in self._streams:
            stream.end()

    async def Serve(
        self, request_iterator: AsyncIterator[Request], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[Response]:
        loop = self.engine_loop
        if len(self._streams) >= _MAX_STREAMS:
            raise ResourceExhausted(f"more than {_MAX_STREAMS} streams of routers", 1.0)
        stream: RouterStream[Response] = RouterStream()
        self._streams.add(stream)
        loop.submit(lambda: self._on_stream_begin(stream))
        reader = asyncio.create_task(self._read(request_iterator, stream, loop))
        try:
            async for response in stream.responses():
                yield response
            if reader.done() and isinstance(error := reader.exception(), OutriderError):
                raise error
        finally:
            reader.cancel()
            self._streams.discard(stream)
            loop.submit(lambda: self._on_stream_end(stream))

    async def GetWorkerInfo(
        self, request: worker_pb2.GetWorkerInfoRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> worker_pb2.WorkerInfo:
        # By the engine's thread: a worker whose engine hangs must not pass for one that serves.
        return await self._ask(self._info)

    def _info(self) -> worker_pb2.WorkerInfo:
        engine = self.engine
        return worker_pb2.WorkerInfo(
            instance_id=self.instance_id,
            model=engine.model.name,
            fingerprint=engine.fingerprint,
            tokenizer_fingerprint=self._tokenizer_fingerprint,
            vocab_size=engine.model.vocab_size,
            max_context=engine.max_context,
            eos_token_ids=sorted(engine.model.eos_token_ids),
            block_size=engine.block_size,
            num_blocks=engine.blocks.counts().total,
            block_bytes=engine.pool.block_num_bytes,
            device=str(engine.model.device),
            dtype=str(engine.model.dtype).removeprefix("torch."),
            step_costs=[worker_pb2.StepCost(num_tokens=n, seconds=seconds) for n, seconds in engine.step_costs],
            max_batch_tokens=engine.scheduler.max_batch_tokens,
        )

    async def GetWorkerState(
        self, request: worker_pb2.GetWorkerStateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> worker_pb2.WorkerState:
        def look() -> worker_pb2.WorkerState:
            self.engine.scheduler.check()
            free, cached, owned, total = self.engine.blocks.counts()
            return worker_pb2.WorkerState(
                free_blocks=free,
                cached_blocks=cached,
                owned_blocks=owned,
                total_blocks=total,
                num_sequences=len(self._lanes),
                num_exports=len(self.engine.scheduler.exports),
                num_imports=len(self.engine.scheduler.imports),
                host_blocks=self.engine.blocks.num_host_blocks,
                restored_blocks=self.engine.blocks.num_restored,
            )

        return await self._ask(look)

    async def drain(self) -> None:
        """Takes no new sequences, and returns when those here have ended and the streams are told so."""
        self._draining = True
        for stream in self._streams:
            self._announce_drain(stream)
        await self._without_lanes.wait()
        if self._engine_loop is not None:
            # The engine's thread lets go of sequences before it sends their last results: one turn of it more.
            with suppress(EngineEnded):
                await self._engine_loop.ask(lambda: None)
        self.end_streams()

    @abstractmethod
    def _announce_drain(self, stream: RouterStream[Response]) -> None:
        """Tells a router that this worker is going."""

    @abstractmethod
    def _check(self, request: Request) -> None:
        """Raises InvalidArgument, which ends the router's stream, for what the engine's thread must not meet."""

    @abstractmethod
    def _on_request(self, stream: RouterStream[Response], request: Request) -> None:
        """Acts on one message of a router."""

    @abstractmethod
    def _on_outcome(self, outcome: StepOutcome) -> None:
        """Answers what a step brought."""

    def _seconds_to_wait(self) -> float:
        """How long the next step should wait for requests that are on their way; on the engine's thread."""
        return 0.0

    def _on_step(self, outcome: StepOutcome) -> None:
        self._on_outcome(outcome)
        if self._metrics is not None:
            self._metrics.step(outcome.num_tokens, outcome.num_sequences)
            for num_tokens in outcome.following:
                self._metrics.step(num_tokens, outcome.num_sequences)

    def _on_release(self, stream: RouterStream[Response], sequence_id: int) -> None:
        lane = stream.lanes.pop(sequence_id, None)
        if lane is not None:
            del self._lanes[lane.sequence]
            self.engine.scheduler.remove(lane.sequence)
            if not self._lanes:
                self._asyncio_loop.call_soon_threadsafe(self._without_lanes.set)

    def _on_stream_begin(self, stream: RouterStream[Response]) -> None:
        """A router has come, and has sent nothing yet."""

    def _on_stream_end(self, stream: RouterStream[Response]) -> None:
        for sequence_id in list(stream.lanes):
            self._on_release(stream, sequence_id)

    def _add_lane(self, stream: RouterStream[Response], sequence_id: int, sequence: Sequence, traceparent: str) -> None:
        lane = Lane(stream, sequence_id, sequence, traceparent)
        stream.lanes[sequence_id] = lane
        if not self._lanes:
            self._asyncio_loop.call_soon_threadsafe(self._without_lanes.clear)
        self._lanes[sequence] = lane

    def _stats(self, outcome: StepOutcome, num_own_prefill_tokens: int = 0) -> worker_pb2.StepStats:
        """For a router that has so many of the tokens of prompts."""
        return worker_pb2.StepStats(
            seconds=outcome.seconds,
            num_tokens=outcome.num_tokens,
            num_prefill_tokens=outcome.num_prefill_tokens,
            num_own_prefill_tokens=num_own_prefill_tokens,
            num_sequences=outcome.num_sequences,
            num_running=self.engine.scheduler.num_running,
            num_waiting=self.engine.scheduler.num_waiting,
            kv_usage=self._kv_usage(),
        )

    def _kv_usage(self) -> float:
        counts = self.engine.blocks.counts()
        return counts.owned / counts.total

    async def _ask(self, question: Callable[[], T]) -> T:
        """What the engine's thread answers. Raises Unavailable if it is there no more."""
        try:
            return await self.engine_loop.ask(question)
        except EngineEnded as error:
            raise Unavailable("the worker is ending") from error

    async def _read(self, requests: AsyncIterator[Request], stream: RouterStream[Response], loop: EngineLoop) -> None:
        try:
            async for request in requests:
                await stream.room()
                self._check(request)
                stream.num_taken += 1
                loop.submit(lambda request=request: self._handle(stream, request))  # type: ignore[misc]
        finally:
            stream.end()

    def _handle(self, stream: RouterStream[Response], request: Request) -> None:
        self._on_request(stream, request)
        stream.num_handled += 1


def _block_states(engine: Engine) -> dict[str, int]:
    counts = engine.blocks.counts()
    return {"free": counts.free, "cached": counts.cached, "owned": counts.owned}


def _sequence_states(engine: Engine) -> dict[str, int]:
    return {"running": engine.scheduler.num_running, "waiting": engine.scheduler.num_waiting}
