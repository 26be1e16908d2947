"""A real server in this process (and once in its own), with the public API and a scripted servicer."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc
import pytest
from google.rpc.error_details_pb2 import BadRequest, RetryInfo  # type: ignore[import-untyped]
from google.rpc.status_pb2 import Status  # type: ignore[import-untyped]
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc  # type: ignore[import-untyped]
from outrider.v1 import inference_pb2, inference_pb2_grpc

from shared.rpc import edge, errors, malformed
from shared.rpc.channel import connect
from shared.rpc.deadline import child_timeout, remaining
from shared.rpc.edge import request_bytes
from shared.rpc.options import CHANNEL_OPTIONS, MAX_MESSAGE_BYTES
from shared.rpc.server import BindError, RpcServer
from shared.telemetry.tracing import configure

SERVICE = "outrider.v1.Inference"

Tokenize = Callable[[inference_pb2.TokenizeRequest, Any], Awaitable[inference_pb2.TokenizeResponse]]


class Scripted(inference_pb2_grpc.InferenceServicer):
    """Tokenize does what the test says; Generate echoes its text, and waits for ever after "wait"."""

    def __init__(self, tokenize: Tokenize | None = None) -> None:
        self.tokenize = tokenize
        self.waiting = asyncio.Event()
        self.released = asyncio.Event()

    async def Tokenize(self, request: inference_pb2.TokenizeRequest, context: Any) -> inference_pb2.TokenizeResponse:
        assert self.tokenize is not None
        return await self.tokenize(request, context)

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        try:
            yield inference_pb2.GenerateResponse(text=request.text)
            if request.text == "wait":
                self.waiting.set()
                await asyncio.Event().wait()
            if request.text == "fail":
                raise errors.Unavailable("the worker is gone")
            while request.text == "flood":
                yield inference_pb2.GenerateResponse(text="x" * 1_000_000)
                self.waiting.set()
        finally:
            self.released.set()

    async def GetModelInfo(
        self, request: inference_pb2.GetModelInfoRequest, context: Any
    ) -> inference_pb2.GetModelInfoResponse:
        return inference_pb2.GetModelInfoResponse(model="tiny")


@asynccontextmanager
async def running(
    servicer: Scripted, register: Any = inference_pb2_grpc.add_InferenceServicer_to_server, **options: Any
) -> AsyncIterator[tuple[RpcServer, grpc.aio.Channel]]:
    server = RpcServer("127.0.0.1:0", configure("test", None), **options)
    server.add(SERVICE, register, servicer)
    await server.start()
    try:
        async with connect(server.address) as channel:
            yield server, channel
    finally:
        await server.stop()


async def health_of(channel: grpc.aio.Channel, service: str) -> str:
    response = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service))
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(response.status))


async def failure(tokenize: Tokenize) -> grpc.aio.AioRpcError:
    """The error a client gets when Tokenize is `tokenize`."""
    async with running(Scripted(tokenize)) as (_, channel):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await inference_pb2_grpc.InferenceStub(channel).Tokenize(
                inference_pb2.TokenizeRequest(text="a"), timeout=30
            )
    return caught.value


def raising(error: BaseException) -> Tokenize:
    async def tokenize(_: object, __: object) -> inference_pb2.TokenizeResponse:
        raise error

    return tokenize


def details_of(error: grpc.aio.AioRpcError) -> Status:
    return Status.FromString(error.trailing_metadata()["grpc-status-details-bin"])


async def test_health_is_not_serving_until_told_and_never_again_after_a_drain() -> None:
    async with running(Scripted()) as (server, channel):
        seen: list[list[str]] = []
        for serving in (None, True, False, True):
            if serving is not None:
                await server.set_serving(serving)
            seen.append([await health_of(channel, service) for service in ("", SERVICE)])
        assert seen == [["NOT_SERVING"] * 2, ["SERVING"] * 2, ["NOT_SERVING"] * 2, ["SERVING"] * 2]

        during: list[str] = []

        async def draining() -> None:
            await server.set_serving(True)
            during.append(await health_of(channel, ""))

        await server.drain(draining, grace=10)
        assert during == ["NOT_SERVING"]


async def test_reflection_lists_the_services_and_describes_them() -> None:
    async with running(Scripted()) as (_, channel):
        requests = [
            reflection_pb2.ServerReflectionRequest(list_services=""),
            reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE),
        ]
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter(requests))
        listed, described = [response async for response in call]
    names = {service.name for service in listed.list_services_response.service}
    assert names == {SERVICE, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}
    assert inference_pb2.DESCRIPTOR.serialized_pb in described.file_descriptor_response.file_descriptor_proto


async def test_an_invalid_argument_reaches_the_client_with_its_details() -> None:
    error = await failure(raising(errors.InvalidArgument("top_p", 1.5, "in (0, 1]")))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error.details() == "top_p is 1.5: must be in (0, 1]"
    detail = BadRequest()
    assert details_of(error).details[0].Unpack(detail)
    assert detail.field_violations[0].field == "top_p"


async def test_a_full_server_says_when_to_come_again() -> None:
    error = await failure(raising(errors.ResourceExhausted("the queue is full", 1.5)))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    detail = RetryInfo()
    assert details_of(error).details[0].Unpack(detail)
    assert detail.retry_delay.ToMilliseconds() == 1500


async def test_a_bug_is_internal_and_its_traceback_stays_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    error = await failure(raising(KeyError("secret")))
    assert (error.code(), error.details()) == (grpc.StatusCode.INTERNAL, "internal error")
    (record,) = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert record.name == "shared.rpc.edge"
    assert "/outrider.v1.Inference/Tokenize" in record.getMessage()
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], KeyError)


async def test_a_cancelled_task_inside_a_handler_does_not_hang_the_client() -> None:
    """grpc itself sends no status then: the client would wait until its deadline."""
    error = await failure(raising(asyncio.CancelledError()))
    assert (error.code(), error.details()) == (grpc.StatusCode.INTERNAL, "internal error")


async def test_a_status_chosen_by_the_handler_is_kept() -> None:
    async def tokenize(_: object, context: Any) -> inference_pb2.TokenizeResponse:
        await context.abort(grpc.StatusCode.NOT_FOUND, "no such model")
        raise AssertionError("unreachable")

    error = await failure(tokenize)
    assert (error.code(), error.details()) == (grpc.StatusCode.NOT_FOUND, "no such model")


async def test_an_error_in_a_stream_ends_it_after_what_was_sent() -> None:
    servicer = Scripted()
    async with running(servicer) as (_, channel):
        call = inference_pb2_grpc.InferenceStub(channel).Generate(inference_pb2.GenerateRequest(text="fail"))
        assert await call.read() == inference_pb2.GenerateResponse(text="fail")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.UNAVAILABLE, "the worker is gone")
        assert servicer.released.is_set()


@pytest.mark.parametrize(
    ("request_bytes", "message"),
    [
        (b"\x0a\x01\xff", "text is b'\\xff': must be valid UTF-8"),
        (b"\xff\xff\xff", "request is b'\\xff\\xff\\xff': must be a well-formed outrider.v1."),
    ],
    ids=["invalid UTF-8", "not protobuf"],
)
async def test_an_undecodable_request_is_an_invalid_argument(request_bytes: bytes, message: str) -> None:
    async with running(Scripted()) as (_, channel):
        tokenize: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(f"/{SERVICE}/Tokenize")
        generate: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(f"/{SERVICE}/Generate")
        calls: tuple[Awaitable[object], ...] = (tokenize(request_bytes), generate(request_bytes).read())
        for call in calls:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert (caught.value.details() or "").startswith(message)


class Decoding:
    """Registers Tokenize and Generate with a deserializer that notes which thread it runs in, and on how many bytes."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.threads: set[int] = set()

    def register(self, servicer: Scripted, server: grpc.aio.Server) -> None:
        handlers: dict[str, Any] = {
            "Tokenize": grpc.unary_unary_rpc_method_handler(
                servicer.Tokenize, self._noting(inference_pb2.TokenizeRequest.FromString), bytes
            ),
            "Generate": grpc.unary_stream_rpc_method_handler(
                servicer.Generate,
                self._noting(inference_pb2.GenerateRequest.FromString),
                inference_pb2.GenerateResponse.SerializeToString,
            ),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))

    def _noting(self, decode: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
        def noting(payload: bytes) -> Any:
            self.sizes.append(len(payload))
            self.threads.add(threading.get_ident())
            return decode(payload)

        return noting


async def refusal(channel: grpc.aio.Channel, payload: bytes, **call: Any) -> grpc.aio.AioRpcError:
    """The error that Generate of these bytes ends with."""
    generate: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(f"/{SERVICE}/Generate")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in generate(payload, timeout=30, **call):
            pass
    return caught.value


LENGTH_OF_8_MB = b"\x80\x80\x80\x04"
HOSTILE = {
    "empty fields and one that is not UTF-8": b"\x72\x00" * 4_000_000 + b"\x72\x01\xff",
    "unknown fields": b"\x98\x06\x01" * 2_500_000,
    "unknown fields in chat messages": b"\x1a" + LENGTH_OF_8_MB + (b"\x0a\x06\x0a\x01u\x98\x06\x01" * (1 << 20)),
    "empty chat messages": b"\x1a" + LENGTH_OF_8_MB + b"\x0a\x00" * (1 << 22),
    "unknown groups": b"\x9b\x06\x9c\x06" * 2_000_000,
    "groups in groups": b"\x9b\x06" * 4_000_000,
    "logit biases": b"\x6a\x00" * 4_000_000,
    "no message at all": b"\xff" * 8_000_000,
    "one long string that is not UTF-8": b"\x0a" + LENGTH_OF_8_MB + b"\xff" * (1 << 23),
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_hostile_bytes_are_neither_walked_over_nor_waited_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The event loop goes on while they are looked at, which costs what the limits allow and not what was sent."""
    decoding, turned = Decoding(), threading.Event()
    searched: list[int] = []
    monkeypatch.setattr(malformed, "_invalid_utf8", lambda payload, *_: searched.append(len(payload)))
    checked: list[bool] = []

    def check_fields(method: str, payload: bytes) -> None:
        # On the loop's own thread this would wait in vain: it is the loop that sets the event.
        turned.clear()
        checked.append(turned.wait(10))
        malformed.check_fields(method, payload)

    async def heartbeat() -> None:
        while True:
            turned.set()
            await asyncio.sleep(0.001)

    monkeypatch.setattr(edge, "check_fields", check_fields)
    async with running(Scripted(), decoding.register) as (_, channel):
        beating = asyncio.create_task(heartbeat())
        error = await refusal(channel, HOSTILE[name])
        beating.cancel()
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (error.details() or "").startswith("request is ")
    assert checked == [True]
    assert searched == []
    # Small fields are not even parsed; the others cost the parser nothing.
    made_of_fields = "no message" not in name and "one long" not in name
    assert decoding.sizes == ([] if made_of_fields else [len(HOSTILE[name])])
    assert threading.get_ident() not in decoding.threads


async def test_small_requests_are_decoded_at_once_and_large_ones_in_a_thread() -> None:
    decoding, handled = Decoding(), []

    async def tokenize(request: inference_pb2.TokenizeRequest, _: object) -> Any:
        handled.append((len(request.text), request_bytes.get()))
        return b""

    async with running(Scripted(tokenize), decoding.register) as (_, channel):
        stub = inference_pb2_grpc.InferenceStub(channel)
        await stub.Tokenize(inference_pb2.TokenizeRequest(text="a"))
        assert decoding.threads == {threading.get_ident()}
        decoding.threads.clear()
        await stub.Tokenize(inference_pb2.TokenizeRequest(text="a" * 1_000_000))
        assert decoding.threads
        assert threading.get_ident() not in decoding.threads
    assert handled == [(1, 3), (1_000_000, 1_000_004)]


async def test_only_so_many_large_requests_wait_to_be_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edge, "_MAX_DECODING", 2)
    hold, checking = threading.Event(), threading.Event()

    def check_fields(*_: object) -> None:
        checking.set()
        assert hold.wait(30)

    monkeypatch.setattr(edge, "check_fields", check_fields)
    large = inference_pb2.GenerateRequest(text="a" * 100_000)
    async with running(Scripted()) as (_, channel):
        stub = inference_pb2_grpc.InferenceStub(channel)
        first, second = stub.Generate(large), stub.Generate(large)
        reading = [asyncio.ensure_future(call.read()) for call in (first, second)]
        await asyncio.to_thread(checking.wait, 30)
        # Of three at most two are held, whichever the server meets last.
        third = asyncio.ensure_future(stub.Generate(large).read())
        done, _ = await asyncio.wait([*reading, third], return_when=asyncio.FIRST_COMPLETED)
        error = done.pop().exception()
        assert isinstance(error, grpc.aio.AioRpcError)
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        retry = RetryInfo()
        assert details_of(error).details[0].Unpack(retry)
        hold.set()
        answers = await asyncio.gather(*reading, third, return_exceptions=True)
        assert sum(isinstance(answer, inference_pb2.GenerateResponse) for answer in answers) == 2


async def test_who_is_not_let_in_sends_for_nothing() -> None:
    """Whatever the method, and before the request is read: not to speak of decoding it."""
    decoding = Decoding()

    def authenticate(metadata: Iterable[tuple[str, str | bytes]]) -> None:
        if ("authorization", "open sesame") not in metadata:
            raise errors.Unauthenticated("unknown API key")

    async def tokenize(*_: object) -> Any:
        return b""

    async with running(Scripted(tokenize), decoding.register, authenticate=authenticate) as (_, channel):
        method: Any
        for payload in (b"", b"\xff", b"x" * 30_000_000):
            for method in (channel.unary_unary(f"/{SERVICE}/Tokenize"), channel.unary_stream(f"/{SERVICE}/Generate")):
                call: Any = method(payload, timeout=30)
                assert await call.code() is grpc.StatusCode.UNAUTHENTICATED
                assert await call.details() == "unknown API key"
        assert decoding.sizes == []
        # Health is not asked who it is.
        assert await health_of(channel, SERVICE) == "NOT_SERVING"
        stub = inference_pb2_grpc.InferenceStub(channel)
        await stub.Tokenize(inference_pb2.TokenizeRequest(), metadata=(("authorization", "open sesame"),))
        assert decoding.sizes == [0]


async def test_a_server_of_its_own_limit_never_sees_what_is_longer() -> None:
    decoding = Decoding()
    async with running(Scripted(), decoding.register, max_request_bytes=100_000) as (_, channel):
        error = await refusal(channel, b"x" * 100_001)
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert decoding.sizes == []
        assert (await refusal(channel, b"\xff" * 100_000)).code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_health_and_reflection_take_small_requests_and_not_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edge, "_MAX_INFRASTRUCTURE_STREAMS", 3)
    async with running(Scripted()) as (_, channel):
        health = health_pb2_grpc.HealthStub(channel)
        long = health_pb2.HealthCheckRequest(service="x" * 5000)
        reflect = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo
        asked = reflection_pb2.ServerReflectionRequest(file_containing_symbol="x" * 5000)
        for call in (health.Check(long), health.Watch(long), reflect(iter([asked]))):
            assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "at most 4096 bytes" in await call.details()
        watching = [health.Watch(health_pb2.HealthCheckRequest()) for _ in range(3)]
        for call in watching:
            await call.read()
        refused = health.Watch(health_pb2.HealthCheckRequest())
        assert await refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        # Else some who watch for ever would have every probe fail, and the process restarted.
        assert await health.Check(health_pb2.HealthCheckRequest()).code() is grpc.StatusCode.OK
        watching[0].cancel()
        async with asyncio.timeout(30):
            while True:
                with suppress(grpc.aio.AioRpcError):
                    await health.Watch(health_pb2.HealthCheckRequest()).read()
                    break


async def test_a_deadline_that_cuts_off_the_initial_metadata_is_no_fault(caplog: pytest.LogCaptureFixture) -> None:
    async def tokenize(_: object, context: Any) -> Any:
        sending = asyncio.create_task(context.send_initial_metadata(()))
        await asyncio.sleep(0)  # it has begun
        sending.cancel()
        raise errors.DeadlineExceeded("it is over")

    async with running(Scripted(tokenize)) as (server, channel):
        call = inference_pb2_grpc.InferenceStub(channel).Tokenize(inference_pb2.TokenizeRequest(), timeout=1.0)
        assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        async with asyncio.timeout(10):
            await server._edge.idle.wait()
    assert [record.message for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_messages_pass_up_to_the_limit() -> None:
    sizes: list[int] = []

    async def tokenize(request: inference_pb2.TokenizeRequest, _: object) -> inference_pb2.TokenizeResponse:
        sizes.append(len(request.text))
        return inference_pb2.TokenizeResponse()

    async with running(Scripted(tokenize)) as (_, channel):
        stub = inference_pb2_grpc.InferenceStub(channel)
        await stub.Tokenize(inference_pb2.TokenizeRequest(text="a" * 10_000_000))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Tokenize(inference_pb2.TokenizeRequest(text="a" * (MAX_MESSAGE_BYTES + 1)))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert sizes == [10_000_000]


@pytest.mark.parametrize("text", ["wait", "flood"], ids=["while it awaits", "while it yields"])
async def test_a_cancelled_stream_closes_its_generator(text: str) -> None:
    servicer = Scripted()
    async with running(servicer) as (_, channel):
        call = inference_pb2_grpc.InferenceStub(channel).Generate(inference_pb2.GenerateRequest(text=text))
        await call.read()
        await servicer.waiting.wait()
        call.cancel()
        async with asyncio.timeout(30):
            await servicer.released.wait()


async def test_a_caller_that_is_there_but_reads_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edge, "_WRITE_SECONDS", 0.3)
    servicer = Scripted()
    async with running(servicer) as (_, channel):
        call = inference_pb2_grpc.InferenceStub(channel).Generate(inference_pb2.GenerateRequest(text="flood"))
        await call.read()
        async with asyncio.timeout(30):
            await servicer.released.wait()
        with suppress(grpc.aio.AioRpcError):
            while await call.read() is not grpc.aio.EOF:
                pass
        assert await call.code() is grpc.StatusCode.ABORTED
        assert "has read nothing for 0.3 s" in await call.details()


async def test_a_write_that_meets_a_cancellation_is_one(caplog: pytest.LogCaptureFixture) -> None:
    """Which of the two the task hears of first is chance; it must be no fault of the server either way."""

    class Gone:
        async def write(self, _: object) -> None:
            raise grpc.aio.InternalError("Failed execute_batch")

    async def stream(_: object, __: object) -> AsyncIterator[bytes]:
        yield b""

    behavior = edge._behavior(grpc.unary_stream_rpc_method_handler(stream))
    with pytest.raises(asyncio.CancelledError):
        await edge._call("a method", behavior, None, Gone())  # type: ignore[arg-type]
    assert caplog.records == []


async def test_the_callers_deadline_bounds_child_calls() -> None:
    bounds: list[tuple[float | None, ...]] = []

    async def tokenize(_: object, context: Any) -> inference_pb2.TokenizeResponse:
        bounds.append((remaining(context), child_timeout(context), child_timeout(context, 7.0)))
        return inference_pb2.TokenizeResponse()

    async with running(Scripted(tokenize)) as (_, channel):
        stub = inference_pb2_grpc.InferenceStub(channel)
        await stub.Tokenize(inference_pb2.TokenizeRequest(text="a"))
        await stub.Tokenize(inference_pb2.TokenizeRequest(text="a"), timeout=100)
    assert bounds[0] == (None, None, 7.0)
    left, unbounded, bounded = bounds[1]
    assert left is not None
    assert unbounded is not None
    # The header that carries a timeout rounds it up.
    assert 50 < unbounded <= left < 105
    assert bounded == 7.0


async def test_no_child_call_is_made_when_time_is_over() -> None:
    class Late:
        def time_remaining(self) -> float:
            return 0.0

    late: Any = Late()
    with pytest.raises(errors.DeadlineExceeded):
        child_timeout(late, 7.0)


async def test_an_address_in_use_is_one_clear_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        server = RpcServer(address, configure("test", None))
        with pytest.raises(BindError, match=f"cannot listen on {address}: in use, or not an address of this machine"):
            await server.start()
        await server.stop()


async def test_two_servers_never_share_a_port() -> None:
    async with running(Scripted()) as (first, _):
        second = RpcServer(first.address, configure("test", None))
        with pytest.raises(BindError):
            await second.start()
        await second.stop()


async def test_a_drain_refuses_new_rpcs_and_lets_running_ones_finish() -> None:
    finish = asyncio.Event()
    started = asyncio.Event()

    async def tokenize(_: object, __: object) -> inference_pb2.TokenizeResponse:
        started.set()
        await finish.wait()
        return inference_pb2.TokenizeResponse(token_ids=[7])

    async with running(Scripted(tokenize)) as (server, channel):
        stub = inference_pb2_grpc.InferenceStub(channel)
        # A watcher of health never ends by itself, and must not hold up the drain.
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=""))
        await watch.read()
        running_call = asyncio.ensure_future(stub.Tokenize(inference_pb2.TokenizeRequest(text="a")))
        await started.wait()
        drained = asyncio.Event()

        async def draining() -> None:
            drained.set()

        drain = asyncio.create_task(server.drain(draining, grace=60))
        await drained.wait()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GetModelInfo(inference_pb2.GetModelInfoRequest())
        assert (caught.value.code(), caught.value.details()) == (
            grpc.StatusCode.UNAVAILABLE,
            "the server is draining",
        )
        assert not drain.done()
        finish.set()
        assert list((await running_call).token_ids) == [7]
        async with asyncio.timeout(30):
            await drain


async def test_a_drain_cancels_what_outlives_its_grace() -> None:
    servicer = Scripted()
    async with running(servicer) as (server, channel):
        call = inference_pb2_grpc.InferenceStub(channel).Generate(inference_pb2.GenerateRequest(text="wait"))
        await call.read()
        await servicer.waiting.wait()

        async def draining() -> None: ...

        await server.drain(draining, grace=0.05)
        # Stopped means released, not only cancelled.
        assert servicer.released.is_set()
        assert await call.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


_PROCESS = """
import asyncio, sys
from outrider.v1 import inference_pb2_grpc
from shared.rpc.server import RpcServer
from shared.telemetry.logs import configure_logging
from shared.telemetry.tracing import configure
from tests.integration.test_rpc_server import SERVICE, Scripted

async def main():
    server = RpcServer("127.0.0.1:0", configure("test", None))
    server.add(SERVICE, inference_pb2_grpc.add_InferenceServicer_to_server, Scripted())
    await server.start()
    await server.set_serving(True)
    async def draining():
        print("draining", flush=True)
        if sys.argv[1] == "stuck":
            await asyncio.Event().wait()
    print(server.address, flush=True)
    await server.serve(draining, grace=300)
    print("stopped", flush=True)

configure_logging("test", "INFO")
asyncio.run(main())
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("behaviour", ["quick", "stuck"])
async def test_a_signal_drains_and_a_second_one_ends(number: signal.Signals, behaviour: str) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _PROCESS, behaviour, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        address = (await process.stdout.readline()).decode().strip()
        async with connect(address) as channel:
            assert await health_of(channel, SERVICE) == "SERVING"
            process.send_signal(number)
            assert await process.stdout.readline() == b"draining\n"
            if behaviour == "stuck":
                assert await health_of(channel, SERVICE) == "NOT_SERVING"
                process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(60):
                out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert out == b"stopped\n"
    assert process.returncode == 0
    messages = [json.loads(line)["message"] for line in err.splitlines()]
    expected = ["listening", "draining"] + (["drain cut short by SIGTERM"] if behaviour == "stuck" else [])
    assert messages == expected


async def test_a_silent_peer_is_found_dead_in_the_time_that_the_options_say() -> None:
    """Of a stopped process's open stream, with every time of the options a tenth of what it is: 4 seconds of 40."""
    scaled = [
        (name, value // 10 if "keepalive_time" in name or "ping_timeout" in name else value)
        for name, value in CHANNEL_OPTIONS
    ]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _PROCESS, "quick", stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        address = (await process.stdout.readline()).decode().strip()
        async with grpc.aio.insecure_channel(address, options=scaled) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=""))
            await watch.read()
            process.send_signal(signal.SIGSTOP)
            # The transport's own default for a ping's answer is a minute.
            async with asyncio.timeout(30):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await watch.read()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    finally:
        process.kill()
        await process.wait()
