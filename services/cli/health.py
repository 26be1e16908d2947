"""`outrider health`: whether a service serves, as an exit status: for container health checks."""

from __future__ import annotations

from typing import Annotated

import grpc
import typer
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]

from services.cli.client import CaOption, CertOption, KeyOption, NameOption, client_credentials, name_option


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
    credentials = client_credentials(ca, cert, key)
    options = name_option(server_name)
    if credentials is None:
        channel = grpc.insecure_channel(address, options)
    else:
        channel = grpc.secure_channel(address, credentials, options)
    try:
        with channel:
            status = check(channel, address, service, timeout)
    except HealthError as error:
        typer.echo(f"outrider: {error}", err=True)
        raise typer.Exit(1) from None
    typer.echo(status)
    if status != "SERVING":
        raise typer.Exit(1)


def check(channel: grpc.Channel, address: str, service: str, timeout_seconds: float) -> str:
    """The name of the status, as `grpc.health.v1` has it. Raises HealthError."""
    request = health_pb2.HealthCheckRequest(service=service)
    try:
        answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=timeout_seconds)
    except grpc.RpcError as error:
        raise HealthError(_reason(error.code(), address, service, timeout_seconds)) from error
    name: str = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    return name


def _reason(code: grpc.StatusCode, address: str, service: str, timeout_seconds: float) -> str:
    if code == grpc.StatusCode.NOT_FOUND:
        return f"{address} has no service {service}"
    if code == grpc.StatusCode.DEADLINE_EXCEEDED:
        return f"no answer from {address} within {timeout_seconds:g} s"
    return f"no server answers at {address}: {code.name}"
