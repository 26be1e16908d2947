"""`outrider health`: whether a service serves, as an exit status: for container health checks."""

from __future__ import annotations

import asyncio
from typing import Annotated

import grpc
import grpc.aio
import typer
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]

from services.cli.client import CaOption, CertOption, Client, KeyOption, NameOption, client_credentials


class HealthError(Exception):
    """Nobody answers, or nobody of that name; the message is one line for the terminal."""


def health(
    address: Annotated[str, typer.Argument(metavar="HOST:PORT", help="Where the service listens.")],
    service: Annotated[
        str, typer.Option(metavar="NAME", help="One gRPC service in place of all of the server's, by its full name.")
    ] = "",
    timeout: Annotated[float, typer.Option(metavar="SECONDS", min=0.001, help="Longest wait for an answer.")] = 5.0,
    ca: CaOption = None,
    cert: CertOption = None,
    key: KeyOption = None,
    server_name: NameOption = None,
) -> None:
    """Say whether a service serves: SERVING and exit status 0, or what it says instead, and 1."""
    client = Client(address, client_credentials(ca, cert, key), server_name)
    try:
        status = asyncio.run(check(client, service, timeout))
    except HealthError as error:
        typer.echo(f"outrider: {error}", err=True)
        raise typer.Exit(1) from None
    typer.echo(status)
    if status != "SERVING":
        raise typer.Exit(1)


async def check(client: Client, service: str, timeout_seconds: float) -> str:
    """The name of the status, as `grpc.health.v1` has it. Raises HealthError."""
    request = health_pb2.HealthCheckRequest(service=service)
    try:
        async with client.connect() as channel:
            answer = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=timeout_seconds)
    except grpc.aio.AioRpcError as error:
        raise HealthError(await _reason(client, error, service, timeout_seconds)) from error
    name: str = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    return name


async def _reason(client: Client, error: grpc.aio.AioRpcError, service: str, timeout_seconds: float) -> str:
    match error.code():
        case grpc.StatusCode.NOT_FOUND:
            return f"{client.address} has no service {service}"
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return f"no answer from {client.address} within {timeout_seconds:g} s"
        case grpc.StatusCode.UNAVAILABLE:
            return await client.unconnected()
        case _:
            return client.refusal(error)
