"""`outrider train-head`: a head for a target."""

from __future__ import annotations

import importlib
from enum import StrEnum
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
from services.cli.training_view import following, write_head_card
from shared.models import DEMO_TARGET


class Kind(StrEnum):
    """What is trained."""

    MEDUSA = "medusa"
    EAGLE3 = "eagle3"


def train_head(
    out: OutArgument,
    target: TargetOption = str(DEMO_TARGET),
    kind: Annotated[Kind, typer.Option(help="What is trained.")] = Kind.EAGLE3,
    text: TextOption = None,
    pattern: PatternOption = "*",
    samples: SamplesOption = None,
    num_steps: Annotated[int, typer.Option(metavar="N", min=1, max=8, help="Tokens that it learns to draft.")] = 4,
    minutes: MinutesOption = 8.0,
    seed: SeedOption = 0,
) -> None:
    """Train a head on what a target computes, for the `--head` of its workers.

    It learns the target's own distributions, not the text's; it ends early when it agrees with the target no more
    often, on held-out text, than before; and it writes a model card with the acceptance that it has in service. Broken
    off, it goes on where it was when it is started again.
    """
    # By name: torch must not be loaded for --help.
    session = importlib.import_module("shared.training.session")
    console = Console()
    wanted, learnt_from = session.WantedHead(kind.value, num_steps), session.Text(text, pattern, samples, seed)
    with following(console, kind.value) as on_progress:
        made = session.train_head(target, wanted, learnt_from, minutes, out, console.print, on_progress)
    console.print(write_head_card(out, kind.value, made))
    session.forget(out)
