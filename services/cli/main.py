"""Entry point of the `outrider` command."""

from __future__ import annotations

import logging
import sys

import typer

from services.cli.health import health
from shared.settings import EXIT_CONFIG, StartupError
from shared.worker.failure import EXIT_FAILED, WorkerFailed


def main(arguments: list[str] | None = None) -> None:
    """Runs the command; a service that cannot start, or a worker that ended itself, says why in one line.

    The exit status is EXIT_CONFIG then, or EXIT_FAILED.
    """
    try:
        _app(sys.argv[1:] if arguments is None else arguments)(args=arguments)
    except (StartupError, WorkerFailed) as error:
        logging.shutdown()
        print(f"outrider: {error}", file=sys.stderr, flush=True)
        raise SystemExit(EXIT_FAILED if isinstance(error, WorkerFailed) else EXIT_CONFIG) from None


def _app(arguments: list[str]) -> typer.Typer:
    """The whole command, or what is asked of every container every few seconds, without the imports of all else."""
    if arguments[:1] != ["health"]:
        from services.cli.app import app

        return app
    app = typer.Typer(name="outrider", add_completion=False, pretty_exceptions_enable=False)
    app.command()(health)
    app.callback()(lambda: None)
    return app


if __name__ == "__main__":
    main()
