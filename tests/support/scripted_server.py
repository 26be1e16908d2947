"""A real server with the public API and a scripted servicer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from google.rpc.status_pb2 import Status  # type: ignore[import-untyped]
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]
from outrider.v1 import inference_pb2, inference_pb2_grpc

from shared.rpc import errors
from shared.rpc.channel import connect
from shared.rpc.server import RpcServer
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
