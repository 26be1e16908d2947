"""Large and hostile requests: where they are decoded, and who is asked before."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import grpc
import pytest
from google.rpc.error_details_pb2 import RetryInfo  # type: ignore[import-untyped]
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc  # type: ignore[import-untyped]
from outrider.v1 import inference_pb2, inference_pb2_grpc

from shared.rpc import edge, errors, malformed
from shared.rpc.edge import request_bytes
from tests.support.scripted_server import SERVICE, Scripted, details_of, health_of, running


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
