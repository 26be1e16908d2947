"""What a client is told when something fails: against a real server in this process."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable
from typing import Any

import grpc
import pytest
from google.rpc.error_details_pb2 import BadRequest, RetryInfo  # type: ignore[import-untyped]
from outrider.v1 import inference_pb2, inference_pb2_grpc

from shared.rpc import errors
from tests.support.scripted_server import SERVICE, Scripted, details_of, failure, raising, running


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
