"""`outrider secrets`: all that the services of a deployment must keep to themselves, a folder for each of them."""

from __future__ import annotations

import secrets
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Final, get_args

import typer

from services.cli.certs import DaysOption, DeploymentOption, HostOption, write_certificates, write_server_certificate
from services.cli.key import key_entry, new_key
from shared.registry.keys import DEFAULT_DEPLOYMENT
from shared.security.api_keys import digest_of
from shared.security.identity import Service

REDIS_USER: Final = "outrider"
"""Whose password the services have."""
TENANT: Final = "default"
"""Whose the first API key is."""

# All that the services do: by scripts and plainly, on keys of theirs alone.
_REDIS_RIGHTS = "~outrider:* resetchannels +@all -@admin -@dangerous"
_SECRET_BYTES = 32


def deployment_secrets(
    folder: Annotated[Path, typer.Argument(help="Where they go; what is there already stays, but for certificates.")],
    deployment: DeploymentOption = DEFAULT_DEPLOYMENT,
    host: HostOption = None,
    redis_host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Name or address by which services reach Redis; may be given often.",
            show_default="redis",
        ),
    ] = None,
    days: DaysOption = 90,
) -> None:
    """Make a deployment's certificates, token, Redis password and first API key: a folder to mount for each service.

    Run again it makes the certificates anew, by the same authority: the services take them without a restart.
    """
    try:
        write_secrets(folder, deployment, host or [], redis_host or ["redis"], timedelta(days=days))
    except (OSError, ValueError) as error:
        typer.echo(f"outrider: no secrets in {folder}: {error}", err=True)
        raise typer.Exit(1) from None
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        typer.echo(path)


def write_secrets(folder: Path, deployment: str, hosts: list[str], redis_hosts: list[str], valid: timedelta) -> None:
    """Fills `folder`, which nobody else may enter; in it the services' folders are for any user: those in containers
    are others. The authority's key is in none of these.

    Raises OSError; ValueError if what is there already is something else.
    """
    authority = folder / "authority"
    if folder.exists() and any(folder.iterdir()) and not authority.exists():
        raise ValueError("it holds other things")
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    write_certificates(authority, deployment, hosts, valid)
    write_server_certificate(authority, "redis", redis_hosts, valid)
    for name in (*get_args(Service), "redis"):
        own = folder / name
        own.mkdir(exist_ok=True)
        own.chmod(0o755)
        # The key first: who reads between the two finds that they do not match, and looks again.
        _copy(authority / f"{name}-key.pem", own / "key.pem")
        _copy(authority / f"{name}.pem", own / "cert.pem")
        _copy(authority / "ca.pem", own / "ca.pem")
    password = _kept(folder / "redis" / "password", secrets.token_urlsafe(_SECRET_BYTES) + "\n")
    digest = digest_of(password.strip()).hex()
    _replace(folder / "redis" / "users.acl", f"user default off\nuser {REDIS_USER} on #{digest} {_REDIS_RIGHTS}\n")
    # Where something else encrypts, it stands in for certificates.
    token = _kept(authority / "token", secrets.token_urlsafe(_SECRET_BYTES) + "\n")
    for name in ("router", "target", "draft"):
        _replace(folder / name / "redis-password", password)
        _replace(folder / name / "token", token)
    # The first key, which the client may have taken with them since.
    if not (folder / "router" / "api-keys.toml").exists():
        key = _kept(folder / "client" / "api-key", new_key() + "\n").strip()
        _kept(folder / "router" / "api-keys.toml", key_entry(key, TENANT) + "\n")
    # The same for all routers: what they store of a tenant's is the tenant's by it.
    _kept(folder / "router" / "settings.toml", f'[router]\ncache_secret = "{secrets.token_urlsafe(_SECRET_BYTES)}"\n')


def _kept(path: Path, content: str) -> str:
    """What the file holds: what it did already, else `content`."""
    if not path.exists():
        _replace(path, content)
    return path.read_text(encoding="utf-8")


def _copy(source: Path, path: Path) -> None:
    _replace(path, source.read_text(encoding="utf-8"))


def _replace(path: Path, content: str) -> None:
    """At once: whoever reads it has the one or the other."""
    temporary = path.with_name(f".{path.name}.new")
    temporary.write_text(content, encoding="utf-8")
    temporary.chmod(0o644)
    temporary.replace(path)
