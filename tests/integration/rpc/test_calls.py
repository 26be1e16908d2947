"""Streams that end early, and deadlines: against a real server in this process."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import grpc
import pytest
from outrider.v1 import inference_pb2, inference_pb2_grpc

from shared.rpc import edge, errors
from shared.rpc.deadline import child_timeout, remaining
from shared.rpc.options import MAX_MESSAGE_BYTES
from tests.support.scripted_server import Scripted, running


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
