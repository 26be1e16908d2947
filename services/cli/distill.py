"""`outrider distill`: a draft model for a target."""

from __future__ import annotations

import importlib
from typing import Annotated

import typer
from rich.console import Console

from services.cli.training_options import (
    MinutesOption,
    OutArgument,
    PatternOption,
    SamplesOption,
    SeedOption,
    TargetOption,
    TextOption,
)
from services.cli.training_view import following, write_draft_card
from shared.models import DEMO_TARGET


def distill(
    out: OutArgument,
    target: TargetOption = str(DEMO_TARGET),
    layers: Annotated[int, typer.Option(metavar="N", min=1, help="Layers of the target's that it keeps.")] = 2,
    width: Annotated[
        float,
        typer.Option(metavar="SHARE", min=0.01, max=1.0, help="Share of the target's channels, heads and neurons."),
    ] = 0.5,
    text: TextOption = None,
    pattern: PatternOption = "*",
    samples: SamplesOption = None,
    minutes: MinutesOption = 8.0,
    seed: SeedOption = 0,
) -> None:
    """Cut a draft model out of a target, and teach it the target's distributions, for `outrider draft --model`.

    It keeps the layers, channels, heads and neurons that do most to text; then it learns, ends, and goes on as
    `train-head` does.
    """
    # By name: torch must not be loaded for --help.
    session = importlib.import_module("shared.training.session")
    console = Console()
    wanted, learnt_from = session.WantedDraft(layers, width), session.Text(text, pattern, samples, seed)
    with following(console, "draft") as on_progress:
        made = session.distill(target, wanted, learnt_from, minutes, out, console.print, on_progress)
    console.print(write_draft_card(out, made))
    session.forget(out)
