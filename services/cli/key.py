"""`outrider key`: a new API key, and what the router's file of keys has to say of it."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated

import typer

from shared.security.api_keys import digest_of

_PREFIX = "outrider-"
_KEY_BYTES = 32


def key(
    tenant: Annotated[str, typer.Argument(help="Whose it is: keys of a tenant share cached prefixes.")],
    max_requests: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Most requests at once.", show_default="no limit")
    ] = None,
    tokens_per_minute: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Most tokens a minute, of prompts and outputs.", show_default="no limit"),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Most output tokens of a request.", show_default="no limit")
    ] = None,
) -> None:
    """Make an API key: shown on stderr, once, and its entry for --api-keys-file on stdout, which holds its hash."""
    if not tenant:
        raise typer.BadParameter("TENANT must not be empty")
    new = new_key()
    limits = {"max_requests": max_requests, "tokens_per_minute": tokens_per_minute, "max_tokens": max_tokens}
    typer.echo(key_entry(new, tenant, limits) + "\n")
    typer.echo(f"{tenant}'s API key, shown only here: {new}", err=True)


def new_key() -> str:
    """With more chance in it than anybody can guess."""
    return _PREFIX + secrets.token_urlsafe(_KEY_BYTES)


def key_entry(key: str, tenant: str, limits: Mapping[str, int | None] = MappingProxyType({})) -> str:
    """Its lines in a file of keys; limits that are None are left out."""
    # TOML's basic strings take what JSON's do, but for surrogates and DEL.
    name = json.dumps(tenant, ensure_ascii=False).replace("\x7f", r"\u007f")
    lines = ["[[key]]", f"tenant = {name}"]
    lines += [f"{setting} = {limit}" for setting, limit in limits.items() if limit is not None]
    # Last: without it an entry is none, so one that is half written lifts no limits.
    return "\n".join([*lines, f'sha256 = "{digest_of(key).hex()}"'])
