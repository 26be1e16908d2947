"""How a command reaches a service: its options, and the channel made of them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import grpc
import grpc.aio
import typer

from shared.security.pem import parse_authorities, parse_chain
from shared.security.watched_files import WatchedFiles
from shared.settings import StartupError

CONNECT_SECONDS = 5.0

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
        return grpc.aio.secure_channel(self.address, self.credentials, name_option(self.server_name))

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Of each of its requests."""
        return () if self.api_key is None else (("authorization", f"Bearer {self.api_key}"),)


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


def name_option(server_name: str | None) -> tuple[tuple[str, Any], ...]:
    """The channel's option for it."""
    return () if server_name is None else (("grpc.ssl_target_name_override", server_name),)
