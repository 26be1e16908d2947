"""How a command reaches a service: its options, and the channel made of them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import grpc
import grpc.aio
import typer
from google.rpc.error_details_pb2 import RetryInfo  # type: ignore[import-untyped]
from google.rpc.status_pb2 import Status  # type: ignore[import-untyped]

from shared.security.pem import parse_authorities, parse_chain
from shared.security.watched_files import WatchedFiles
from shared.settings import StartupError

DEFAULT_ADDRESS: Final = "127.0.0.1:50051"
"""Where `outrider up` has its router."""
CONNECT_SECONDS: Final = 5.0

CaOption = Annotated[
    Path | None,
    typer.Option("--ca", metavar="FILE", help="PEM certificates of the server's authorities: connects by TLS."),
]
CertOption = Annotated[
    Path | None, typer.Option("--cert", metavar="FILE", help="PEM certificate to show, if the server asks for one.")
]
KeyOption = Annotated[Path | None, typer.Option("--key", metavar="FILE", help="PEM private key of --cert.")]
NameOption = Annotated[
    str | None,
    typer.Option("--server-name", metavar="NAME", help="Name in the server's certificate, if not that of the address."),
]
ApiKeyOption = Annotated[
    str | None, typer.Option(metavar="KEY", envvar="OUTRIDER_API_KEY", help="API key, if one is needed.")
]


@dataclass(frozen=True, slots=True)
class Client:
    """Reaches the service at `address`, by TLS if there are `credentials`, and says whose its requests are."""

    address: str
    credentials: grpc.ChannelCredentials | None = None
    server_name: str | None = None
    api_key: str | None = None

    def connect(self) -> grpc.aio.Channel:
        if self.credentials is None:
            return grpc.aio.insecure_channel(self.address)
        return grpc.aio.secure_channel(self.address, self.credentials, _name_option(self.server_name))

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Of each of its requests."""
        return () if self.api_key is None else (("authorization", f"Bearer {self.api_key}"),)

    async def unconnected(self) -> str:
        """What to tell the user when `connects` said no: that nobody answers, or what may be amiss if somebody does."""
        if not await _listens(self.address):
            hint = ": start one with `outrider up`" if self.address == DEFAULT_ADDRESS else ""
            return f"no server answers at {self.address}{hint}"
        if self.credentials is None:
            return f"{self.address} does not take connections in plain text: --ca makes them by TLS"
        return (
            f"no connection by TLS with {self.address}: its certificate is not of --ca, or not for that name "
            "(--server-name), or it wants one of yours (--cert and --key), or takes plain text alone"
        )

    def refusal(self, error: grpc.aio.AioRpcError) -> str:
        """What the service said, and what to do then if it is known: in one line."""
        said = f"{error.code().name}: {error.details()}"
        if error.code() == grpc.StatusCode.UNAUTHENTICATED and self.api_key is None:
            return f"{said} (--api-key, or OUTRIDER_API_KEY)"
        seconds = _retry_after(error)
        return said if seconds is None else f"{said}; try again in {seconds:.3g} s"


async def connects(channel: grpc.aio.Channel) -> bool:
    """Whether the channel gets its connection, before the first refusal and within CONNECT_SECONDS."""
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            while (state := channel.get_state(try_to_connect=True)) != grpc.ChannelConnectivity.READY:
                if state == grpc.ChannelConnectivity.TRANSIENT_FAILURE:
                    return False
                await channel.wait_for_state_change(state)
    except TimeoutError:
        return False
    return True


async def _listens(address: str) -> bool:
    """Whether somebody takes connections at host:port; of addresses in gRPC's other forms False."""
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except (OSError, ValueError, TimeoutError):
        return False
    writer.close()
    return True


def _retry_after(error: grpc.aio.AioRpcError) -> float | None:
    """The seconds of the google.rpc.RetryInfo that came with `error`, if one did."""
    status, retry = Status(), RetryInfo()
    details = dict(error.trailing_metadata() or ()).get("grpc-status-details-bin")
    if details is None:
        return None
    status.ParseFromString(details)
    found = [detail for detail in status.details if detail.Unpack(retry)]
    return retry.retry_delay.ToTimedelta().total_seconds() if found else None


def client_credentials(ca: Path | None, cert: Path | None, key: Path | None) -> grpc.ChannelCredentials | None:
    """None without a `ca`: plain text. Raises StartupError if the files cannot be used."""
    if (cert is None) != (key is None) or (cert is not None and ca is None):
        raise StartupError("--cert needs --key and --ca, and --key needs --cert")
    if ca is None:
        return None
    authorities = WatchedFiles([ca], parse_authorities).current()
    if cert is None or key is None:
        return grpc.ssl_channel_credentials(authorities)
    chain = WatchedFiles([cert, key], parse_chain).current()
    return grpc.ssl_channel_credentials(authorities, chain.key, chain.certificates)


def _name_option(server_name: str | None) -> tuple[tuple[str, Any], ...]:
    """The channel's option for it."""
    return () if server_name is None else (("grpc.ssl_target_name_override", server_name),)
