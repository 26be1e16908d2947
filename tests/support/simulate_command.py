"""`outrider simulate` in this process."""

from __future__ import annotations

import typer
from typer.testing import CliRunner

from services.cli.simulate import simulate


def command(*arguments: str) -> tuple[int, str]:
    """Its exit code, and what it says in a wide terminal."""
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(simulate)
    result = CliRunner().invoke(app, arguments, terminal_width=240, env={"COLUMNS": "240"})
    return result.exit_code, result.output
