"""How a command reaches a service that speaks TLS: its options, and the credentials made of them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import grpc
import typer

from shared.security.pem import parse_authorities, parse_chain
from shared.security.watched_files import WatchedFiles
from shared.settings import StartupError

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
