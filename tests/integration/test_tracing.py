"""Spans and metrics as a collector gets them, across real gRPC hops."""

from __future__ import annotations

import asyncio
import gc
import logging
import re
import socket
import threading
import time
import weakref
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Any, cast

import grpc
import pytest
from opentelemetry.context import Context
from opentelemetry.trace import format_trace_id, get_current_span
from outrider.v1 import inference_pb2, inference_pb2_grpc, target_pb2, target_pb2_grpc, worker_pb2

from shared.rpc import errors
from shared.rpc.channel import connect, trace_metadata
from shared.rpc.server import RpcServer
from shared.telemetry.failure import Failure
from shared.telemetry.metrics import RouterMetrics
from shared.telemetry.tracing import Telemetry, configure, parent_context, traceparent
from tests.support.otlp import OtlpReceiver, otlp_receiver

GENERATE = "outrider.v1.Inference/Generate"
TOKENIZE = "outrider.v1.Inference/Tokenize"
SERVER_KIND = 2
ERROR = 2


class Router(inference_pb2_grpc.InferenceServicer):
    """Generate opens a span, calls a worker, and ends as the text says.

    Tokenize refuses its argument; GetModelInfo fails if it is traced.
    """

    def __init__(self, telemetry: Telemetry, worker: grpc.aio.Channel | None) -> None:
        self._telemetry = telemetry
        self._worker = worker

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        with self._telemetry.span("round", attributes={"outrider.round": 1}) as span:
            if self._worker is not None:
                stub = target_pb2_grpc.TargetStub(self._worker)
                await stub.GetWorkerState(worker_pb2.GetWorkerStateRequest(), metadata=trace_metadata())
                prefill = target_pb2.Prefill(sequence_id=1, traceparent=traceparent(span))
                operations = [target_pb2.TargetOperation(prefill=prefill)]
                call = stub.Serve(iter([target_pb2.TargetRequest(operations=operations)]))
                async for _ in call:
                    pass
            yield inference_pb2.GenerateResponse(text="a")
            while request.text == "flood":
                yield inference_pb2.GenerateResponse(text="x" * 1_000_000)
            if request.text == "wait":
                await asyncio.Event().wait()

    async def Tokenize(self, request: object, context: object) -> inference_pb2.TokenizeResponse:
        raise errors.InvalidArgument("text", "", "at least one character")

    async def GetModelInfo(self, request: object, context: object) -> inference_pb2.GetModelInfoResponse:
        assert not get_current_span().is_recording(), "a bug"
        return inference_pb2.GetModelInfoResponse()


class Worker(target_pb2_grpc.TargetServicer):
    """Answers each prefill with a result, and a span measured in a thread of its own."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry

    async def Serve(self, request_iterator: Any, context: Any) -> AsyncIterator[target_pb2.TargetResponse]:
        async for request in request_iterator:
            for prefill in [operation.prefill for operation in request.operations]:
                arguments = ("prefill", prefill.traceparent, 1_000, 5_000, {"outrider.cached_tokens": 16})
                engine = threading.Thread(target=self._telemetry.record_span, args=arguments)
                engine.start()
                await asyncio.to_thread(engine.join)
                yield target_pb2.TargetResponse(results=[target_pb2.StepResult(sequence_id=prefill.sequence_id)])

    async def GetWorkerInfo(self, request: object, context: object) -> worker_pb2.WorkerInfo:
        return worker_pb2.WorkerInfo()

    async def GetWorkerState(self, request: object, context: object) -> worker_pb2.WorkerState:
        return worker_pb2.WorkerState()


@pytest.fixture
def receiver() -> Iterator[OtlpReceiver]:
    with otlp_receiver() as receiving:
        yield receiving


@asynccontextmanager
async def router(telemetry: Telemetry, worker: grpc.aio.Channel | None = None) -> AsyncIterator[grpc.aio.Channel]:
    server = RpcServer("127.0.0.1:0", telemetry)
    server.add("outrider.v1.Inference", inference_pb2_grpc.add_InferenceServicer_to_server, Router(telemetry, worker))
    await server.start()
    try:
        async with connect(server.address) as channel:
            yield channel
    finally:
        await server.stop()
        await asyncio.to_thread(telemetry.shutdown)


@asynccontextmanager
async def target(telemetry: Telemetry) -> AsyncIterator[grpc.aio.Channel]:
    server = RpcServer("127.0.0.1:0", telemetry)
    server.add("outrider.v1.Target", target_pb2_grpc.add_TargetServicer_to_server, Worker(telemetry))
    await server.start()
    try:
        async with connect(server.address) as channel:
            yield channel
    finally:
        await server.stop()
        await asyncio.to_thread(telemetry.shutdown)


async def test_one_trace_connects_client_router_and_worker(receiver: OtlpReceiver) -> None:
    client = configure("client", receiver.endpoint)
    async with (
        target(configure("target", receiver.endpoint)) as worker,
        router(configure("router", receiver.endpoint), worker) as channel,
    ):
        with client.span("request"):
            call = inference_pb2_grpc.InferenceStub(channel).Generate(
                inference_pb2.GenerateRequest(text="a"), metadata=trace_metadata()
            )
            assert [response.text async for response in call] == ["a"]
    await asyncio.to_thread(client.shutdown)

    # Shutting down has flushed everything; the worker's stream itself is no span.
    assert len(receiver.spans) == 5
    request, generate, round_span = (receiver.span(name) for name in ("request", GENERATE, "round"))
    state, prefill = receiver.span("outrider.v1.Target/GetWorkerState"), receiver.span("prefill")
    assert len({span.trace_id for span in receiver.spans}) == 1
    assert request.parent_id == ""
    assert generate.parent_id == request.span_id
    assert round_span.parent_id == generate.span_id
    assert state.parent_id == round_span.span_id
    assert prefill.parent_id == round_span.span_id
    services = [span.service for span in (request, generate, round_span, state, prefill)]
    assert services == ["client", "router", "router", "target", "target"]
    assert generate.kind == SERVER_KIND
    assert generate.attributes["rpc.response.status_code"] == "OK"
    assert generate.attributes["rpc.method"] == GENERATE
    assert round_span.attributes["outrider.round"] == 1
    assert (prefill.start_ns, prefill.end_ns) == (1_000, 5_000)
    assert prefill.attributes == {"outrider.cached_tokens": 16}
    assert {span.status for span in receiver.spans} == {0}


@pytest.mark.parametrize("text", ["wait", "flood"], ids=["while it awaits", "while it yields"])
async def test_a_cancelled_stream_ends_its_spans_and_says_so(text: str, receiver: OtlpReceiver) -> None:
    async with router(configure("router", receiver.endpoint)) as channel:
        call = inference_pb2_grpc.InferenceStub(channel).Generate(inference_pb2.GenerateRequest(text=text))
        await call.read()
        call.cancel()
    for name in ("round", GENERATE):
        span = receiver.span(name)
        assert (span.status, span.status_message) == (ERROR, "cancelled")
        assert span.attributes["outrider.cancelled"] is True
        assert span.events == ("cancelled",)
    assert receiver.span(GENERATE).attributes["rpc.response.status_code"] == "CANCELLED"


async def test_an_error_is_on_the_span(receiver: OtlpReceiver) -> None:
    async with router(configure("router", receiver.endpoint)) as channel:
        with pytest.raises(grpc.aio.AioRpcError):
            await inference_pb2_grpc.InferenceStub(channel).Tokenize(inference_pb2.TokenizeRequest())
    span = receiver.span(TOKENIZE)
    assert span.status == ERROR
    assert span.status_message == "text is '': must be at least one character"
    assert span.attributes["rpc.response.status_code"] == "INVALID_ARGUMENT"
    assert span.attributes["error.type"] == "InvalidArgument"
    assert span.events == ("exception",)


async def test_the_log_line_of_a_bug_carries_its_trace(receiver: OtlpReceiver) -> None:
    logged: list[str] = []

    class TraceIds(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            logged.append(format_trace_id(get_current_span().get_span_context().trace_id))

    handler = TraceIds(logging.ERROR)
    logging.getLogger("shared.rpc.edge").addHandler(handler)
    try:
        async with router(configure("router", receiver.endpoint)) as channel:
            with pytest.raises(grpc.aio.AioRpcError):
                await inference_pb2_grpc.InferenceStub(channel).GetModelInfo(inference_pb2.GetModelInfoRequest())
    finally:
        logging.getLogger("shared.rpc.edge").removeHandler(handler)
    assert logged == [receiver.span("outrider.v1.Inference/GetModelInfo").trace_id]


async def test_an_unsampled_caller_is_not_traced(receiver: OtlpReceiver) -> None:
    """The caller's trace flags decide: 00 is not sampled."""
    async with router(configure("router", receiver.endpoint)) as channel:
        metadata = (("traceparent", f"00-{'a' * 32}-{'b' * 16}-00"),)
        stub = inference_pb2_grpc.InferenceStub(channel)
        await stub.GetModelInfo(inference_pb2.GetModelInfoRequest(), metadata=metadata)
    assert receiver.spans == []


def test_metrics_are_exported(receiver: OtlpReceiver) -> None:
    telemetry = configure("router", receiver.endpoint)
    RouterMetrics(telemetry.meter, "tiny").first_token(0.03, "chat")
    telemetry.shutdown()
    receiver.wait_for(lambda got: bool(got.metrics), timeout=10)
    (point,) = receiver.metric("gen_ai.server.time_to_first_token").histogram.data_points
    assert (point.count, point.sum) == (1, 0.03)
    assert [service for service, _ in receiver.metrics] == ["router"]


def test_traceparent_is_w3c_and_comes_back(receiver: OtlpReceiver) -> None:
    telemetry = configure("router", receiver.endpoint)
    with telemetry.span("a") as span:
        text = traceparent(span)
    telemetry.shutdown()
    # Sampled, and perhaps the flag of a random trace id.
    match = re.fullmatch(r"00-([0-9a-f]{32})-([0-9a-f]{16})-0[13]", text)
    assert match is not None
    sent = receiver.span("a")
    assert match.groups() == (sent.trace_id, sent.span_id)
    remote = get_current_span(parent_context(text)).get_span_context()
    assert (f"{remote.trace_id:032x}", f"{remote.span_id:016x}") == match.groups()
    assert remote.is_remote


@pytest.mark.parametrize("text", ["", "rubbish", f"00-{'0' * 32}-{'b' * 16}-01"])
def test_a_malformed_traceparent_is_no_parent(text: str) -> None:
    assert parent_context(text) == Context()


def test_nothing_is_recorded_without_an_endpoint() -> None:
    telemetry = configure("router", None)
    with telemetry.span("a") as span:
        assert not span.is_recording()
        assert traceparent(span) == ""
        assert trace_metadata() == ()
    telemetry.record_span("b", "", 1, 2)
    telemetry.record_span("b", f"00-{'a' * 32}-{'b' * 16}-01", 1, 2)
    telemetry.shutdown()


def test_an_error_costs_nothing_where_nothing_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    described: list[BaseException] = []
    monkeypatch.setattr(Failure, "of", described.append)
    telemetry = configure("router", None)
    with pytest.raises(ValueError, match="a bug"), telemetry.span("a"):
        raise ValueError("a bug")
    assert described == []


def test_a_sequence_without_traceparent_makes_no_span(receiver: OtlpReceiver) -> None:
    telemetry = configure("target", receiver.endpoint)
    telemetry.record_span("step", "", 1, 2)
    telemetry.shutdown()
    assert receiver.spans == []


def test_a_noted_span_is_what_a_span_is(receiver: OtlpReceiver) -> None:
    telemetry = configure("router", receiver.endpoint)
    with telemetry.span("request") as span:
        parent = traceparent(span)
        with telemetry.noted_span("round", parent) as noted:
            noted.attributes = {"outrider.round": 1}
            telemetry.record_span("draft", noted.traceparent, 1_000, 5_000)
        for error in (ValueError("a bug \udcff"), asyncio.CancelledError()):
            with pytest.raises(type(error)), telemetry.noted_span("failed", parent):
                raise error
    telemetry.shutdown()
    request, found, draft = (receiver.span(name) for name in ("request", "round", "draft"))
    assert (found.parent_id, draft.parent_id) == (request.span_id, found.span_id)
    assert request.start_ns <= found.start_ns <= found.end_ns <= request.end_ns
    assert (found.attributes, found.status) == ({"outrider.round": 1}, 0)
    broken, cancelled = receiver.named("failed")
    if broken.events == ("cancelled",):
        broken, cancelled = cancelled, broken
    assert (broken.status, broken.status_message, broken.events) == (ERROR, "a bug ?", ("exception",))
    assert broken.attributes == {"error.type": "ValueError"}
    assert (cancelled.status, cancelled.status_message) == (ERROR, "cancelled")
    assert cancelled.attributes == {"outrider.cancelled": True}


def test_one_span_that_cannot_be_made_is_the_only_one_lost(receiver: OtlpReceiver) -> None:
    class Unspeakable(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no")

    telemetry = configure("router", receiver.endpoint)
    parent = f"00-{'a' * 32}-{'b' * 16}-01"
    with pytest.raises(Unspeakable), telemetry.noted_span("unspeakable", parent):
        raise Unspeakable
    telemetry.record_span("unmakable", parent, 1, 2, cast(Any, 5))
    telemetry.record_span("next", parent, 1_000, 5_000)
    telemetry.shutdown()
    assert receiver.span("next").end_ns == 5_000
    assert receiver.span("unspeakable").status == ERROR


def test_a_flood_of_noted_spans_is_bounded_and_told_of(
    receiver: OtlpReceiver, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shared.telemetry.noted_spans._MANY", 1 << 20)
    monkeypatch.setattr("shared.telemetry.noted_spans._SECONDS", 60.0)
    telemetry = configure("router", receiver.endpoint)
    for i in range(5_000):
        telemetry.record_span(f"span {i}", f"00-{'a' * 32}-{'b' * 16}-01", 1_000, 5_000)
    telemetry.shutdown()
    assert "spans came faster than they could be made: 904 are lost" in caplog.text
    assert receiver.named("span 903") == []


def test_an_error_does_not_outlive_its_handling_for_a_span() -> None:
    class Held:
        pass

    telemetry = configure("router", None)

    def fail() -> weakref.ref[Held]:
        held = Held()
        with suppress(ValueError), telemetry.noted_span("round", f"00-{'a' * 32}-{'b' * 16}-01") as _span:
            raise ValueError(held)
        return weakref.ref(held)

    gc.disable()
    try:
        assert fail()() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("endpoint", ["ftp://collector:4317", "http://", "redis://a:1"])
def test_a_wrong_endpoint_is_refused(endpoint: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"telemetry endpoint is {endpoint!r}")):
        configure("router", endpoint)


def test_a_collector_that_is_down_costs_nothing_but_the_telemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared.telemetry.tracing._EXPORT_SECONDS", 1)
    monkeypatch.setattr("shared.telemetry.tracing._SHUTDOWN_SECONDS", 2.0)
    with socket.socket() as nobody:
        # Bound, but not listening: connections are refused.
        nobody.bind(("127.0.0.1", 0))
        telemetry = configure("router", f"http://127.0.0.1:{nobody.getsockname()[1]}")
        metrics = RouterMetrics(telemetry.meter, "tiny")
        for _ in range(5_000):
            with telemetry.span("a"):
                metrics.round_verified("model", 4, 2)
        start = time.monotonic()
        telemetry.shutdown()
        assert time.monotonic() - start < 15
