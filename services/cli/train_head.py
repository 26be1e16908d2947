"""`outrider train-head`: a head for a target, from text or from what the target writes itself."""

from __future__ import annotations

import importlib
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as ProgressBar

from services.cli.training_view import write_card
from shared.models import DEMO_TARGET

if TYPE_CHECKING:
    from shared.training.trainer import Progress


class Kind(StrEnum):
    """What is trained."""

    MEDUSA = "medusa"
    EAGLE3 = "eagle3"


def train_head(
    out: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Where it goes; one that was begun there is gone on with.")
    ],
    target: Annotated[
        str, typer.Option(metavar="MODEL", help="Target: a local folder or a hub name.", show_default="the demo target")
    ] = str(DEMO_TARGET),
    kind: Annotated[Kind, typer.Option(help="What is trained.")] = Kind.EAGLE3,
    text: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", exists=True, help="Text to train on.", show_default="Python's standard library"),
    ] = None,
    pattern: Annotated[str, typer.Option(metavar="GLOB", help="Names of the files below it.")] = "*",
    samples: Annotated[
        int | None, typer.Option(metavar="N", min=4096, help="Train on so many tokens that the target writes instead.")
    ] = None,
    num_steps: Annotated[int, typer.Option(metavar="N", min=1, max=8, help="Tokens that it learns to draft.")] = 4,
    minutes: Annotated[float, typer.Option(metavar="M", min=0.01, help="How long, if it improves for so long.")] = 8.0,
    seed: Annotated[int, typer.Option(metavar="N", help="The same seed sees the same text.")] = 0,
) -> None:
    """Train a head on what a target computes, for the `--head` of its workers.

    It learns the target's own distributions, not the text's; it ends early when it agrees with the target no more
    often, on held-out text, than before; and it writes a model card with the acceptance that it has in service. Broken
    off, it goes on where it was when it is started again.
    """
    # By name: torch must not be loaded for --help.
    session = importlib.import_module("shared.training.session")
    console = Console()
    wanted = session.Wanted(target, kind.value, num_steps, minutes, text, pattern, samples, seed)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with ProgressBar(*columns, console=console) as bar:
        task = bar.add_task(kind.value, total=1.0)

        shown: list[float] = []

        def on_progress(progress: Progress) -> None:
            shares = " ".join(f"{share:.0%}" for share in progress.agreements)
            described = f"{kind.value}: loss {progress.loss:.3f}" + (f", agrees {shares}" if shares else "")
            bar.update(task, completed=progress.share, description=described)
            if not console.is_terminal and progress.agreements != shown:  # where no bar moves, lines tell
                shown[:] = progress.agreements
                console.print(f"{progress.share:.0%} {described}")

        made = session.train_head(wanted, out, console.print, on_progress)
    console.print(write_card(out, kind.value, made))
