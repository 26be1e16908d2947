"""Entry point of the `outrider` command."""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import sys
from importlib.metadata import version
from typing import Annotated

import typer

from services.cli.certs import certs
from services.cli.demo import demo
from services.cli.generate import generate
from services.cli.health import health
from services.cli.key import key
from services.cli.launcher import PREPARED, die_with_parent, prepare_this_process
from services.cli.options import command_from_settings
from services.cli.simulate import simulate
from services.cli.up import up
from services.draft.settings import DraftSettings
from services.router.settings import RouterSettings
from services.target.settings import TargetSettings
from shared.engine.settings import EngineSettings
from shared.rpc.server import BindError
from shared.settings import EXIT_CONFIG, ServiceSettings, StartupError
from shared.worker.failure import EXIT_FAILED, WorkerFailed

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
    if isinstance(settings, EngineSettings) and not settings.device.startswith("cuda"):
        prepare_this_process()
    # Imported here, not above: torch must not be loaded for --help, nor before the environment is right.
    from shared.telemetry.logs import configure_logging

    configure_logging(settings.service, settings.log_level)
    if PREPARED in os.environ:
        logging.getLogger("services.cli").info("worker environment: %s", os.environ[PREPARED])
    server = importlib.import_module(f"services.{settings.service}.server")
    asyncio.run(server.serve(settings))


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
app.command()(demo)
app.command()(simulate)

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


def main(arguments: list[str] | None = None) -> None:
    """Runs the command; a service that cannot start, or a worker that ended itself, says why in one line.

    The exit status is EXIT_CONFIG then, or EXIT_FAILED.
    """
    try:
        app(args=arguments)
    except (StartupError, BindError, WorkerFailed) as error:
        logging.shutdown()
        print(f"outrider: {error}", file=sys.stderr, flush=True)
        raise SystemExit(EXIT_FAILED if isinstance(error, WorkerFailed) else EXIT_CONFIG) from None


if __name__ == "__main__":
    main()
