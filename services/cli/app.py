"""The `outrider` command, whole."""

from __future__ import annotations

import importlib
import logging
import os
import signal
from importlib.metadata import version
from typing import Annotated

import typer
import uvloop

from services.cli.certs import certs
from services.cli.demo import demo
from services.cli.deployment_secrets import deployment_secrets
from services.cli.distill import distill
from services.cli.generate import generate
from services.cli.health import health
from services.cli.key import key
from services.cli.launcher import PREPARED, die_with_parent, prepare_this_process
from services.cli.load.command import load
from services.cli.options import command_from_settings
from services.cli.simulate import simulate
from services.cli.train_head import train_head
from services.cli.up import up
from services.draft.settings import DraftSettings
from services.router.settings import RouterSettings
from services.target.settings import TargetSettings
from shared.engine.settings import EngineSettings
from shared.settings import ServiceSettings

app = typer.Typer(
    name="outrider",
    help="Serves large language models over gRPC, losslessly and fast, by speculative decoding.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _serve(settings: ServiceSettings) -> None:
    """Runs one service until it has drained. Raises StartupError if it cannot start."""
    die_with_parent()
    if os.getpid() == 1:
        # Until it serves, and takes the signal for a drain: as it is with any process but a container's first.
        signal.signal(signal.SIGTERM, lambda number, _: os._exit(128 + number))
    if isinstance(settings, EngineSettings) and not settings.device.startswith("cuda"):
        prepare_this_process()
    # Imported here, not above: torch must not be loaded for --help, nor before the environment is right.
    from shared.rpc.open_files import allow_open_files
    from shared.telemetry.logs import configure_logging

    configure_logging(settings.service, settings.log_level)
    allow_open_files()
    if PREPARED in os.environ:
        logging.getLogger("services.cli").info("worker environment: %s", os.environ[PREPARED])
    server = importlib.import_module(f"services.{settings.service}.server")
    uvloop.run(server.serve(settings))


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"outrider {version('outrider')}")
        raise typer.Exit


@app.callback()
def outrider(
    _version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


app.command()(up)
app.command()(generate)
app.command()(health)
app.command()(certs)
app.command()(key)
app.command("secrets")(deployment_secrets)
app.command()(load)
app.command()(demo)
app.command()(simulate)
app.command()(train_head)
app.command()(distill)

_SOURCES = (
    "Every option may also be set in the environment, as OUTRIDER_{name}_<OPTION>, or in the \\[{table}] table of the "
    "TOML file that --config or OUTRIDER_CONFIG names. Options win over the environment, the environment over the file."
)

for _settings, _help in (
    (RouterSettings, "Run the router: the public Inference API."),
    (TargetSettings, "Run a target worker: prefill and verification."),
    (DraftSettings, "Run a draft worker: proposals."),
):
    app.command(
        _settings.service,
        help=f"{_help}\n\n{_SOURCES.format(name=_settings.service.upper(), table=_settings.service)}",
    )(command_from_settings(_settings, _serve))
