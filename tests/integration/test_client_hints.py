"""What the commands say when a service is there and they do not get in: what to try, in one line."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from outrider.v1 import inference_pb2, inference_pb2_grpc
from typer.testing import CliRunner

from services.cli.app import app
from services.cli.certs import write_certificates
from shared.rpc.errors import OutriderError, ResourceExhausted, Unauthenticated
from shared.rpc.server import RpcServer
from shared.security.pem import parse_chain
from shared.security.server_credentials import server_credentials
from shared.security.watched_files import WatchedFiles
from shared.telemetry.tracing import configure


class Refusing(inference_pb2_grpc.InferenceServicer):
    def __init__(self, error: OutriderError) -> None:
        self._error = error

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        raise self._error
        yield inference_pb2.GenerateResponse()

    async def GetModelInfo(self, request: Any, context: Any) -> inference_pb2.GetModelInfoResponse:
        raise self._error

    async def Tokenize(self, request: Any, context: Any) -> inference_pb2.TokenizeResponse:
        raise self._error


@asynccontextmanager
async def refusing(error: OutriderError, credentials: Any = None) -> AsyncIterator[str]:
    """The address of a server that does."""
    server = RpcServer("127.0.0.1:0", configure("test", None), credentials=credentials)
    server.add("outrider.v1.Inference", inference_pb2_grpc.add_InferenceServicer_to_server, Refusing(error))
    await server.start()
    try:
        yield server.address
    finally:
        await server.stop()


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificates")
    write_certificates(folder, "default", [], timedelta(days=1))
    return folder


async def said(*arguments: str) -> str:
    """What the command wrote to stderr; it must fail, in one line."""
    result = await asyncio.to_thread(CliRunner().invoke, app, arguments, env={"OUTRIDER_API_KEY": None})
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (1, "", 1), result.output
    return result.stderr.removeprefix("outrider: ").strip()


@pytest.mark.parametrize("command", [("generate", "hello", "--address"), ("load", "--address"), ("health",)])
async def test_who_speaks_another_way_than_asked(command: tuple[str, ...], certificates: Path) -> None:
    error = Unauthenticated("no")
    ca, chain = str(certificates / "ca.pem"), [certificates / "router.pem", certificates / "router-key.pem"]
    async with refusing(error) as address:
        assert (await said(*command, address, "--ca", ca)).startswith(f"no connection by TLS with {address}: ")
    async with refusing(error, server_credentials(WatchedFiles(chain, parse_chain), None)) as address:
        in_plain_text = f"{address} does not take connections in plain text: --ca makes them by TLS"
        assert await said(*command, address) == in_plain_text
        hint = await said(*command, address, "--ca", ca, "--server-name", "elsewhere.example")
        assert "--server-name" in hint


@pytest.mark.parametrize("command", [("generate", "hello"), ("load",)])
async def test_what_the_service_said_and_what_to_do(command: tuple[str, ...]) -> None:
    async with refusing(Unauthenticated("a key is needed")) as address:
        no_key = await said(*command, "--address", address)
        assert no_key == "UNAUTHENTICATED: a key is needed (--api-key, or OUTRIDER_API_KEY)"
        wrong_key = await said(*command, "--address", address, "--api-key", "wrong")
        assert wrong_key == "UNAUTHENTICATED: a key is needed"
    async with refusing(ResourceExhausted("full", 2.5)) as address:
        full = await said(*command, "--address", address)
        assert full == "RESOURCE_EXHAUSTED: full; try again in 2.5 s"
