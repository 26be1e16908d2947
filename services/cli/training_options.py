"""Options that all trainings share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

OutArgument = Annotated[
    Path, typer.Argument(metavar="FOLDER", help="Where it goes: empty, or what was begun there is gone on with.")
]
TargetOption = Annotated[
    str, typer.Option(metavar="MODEL", help="Target: a local folder or a hub name.", show_default="the demo target")
]
TextOption = Annotated[
    Path | None,
    typer.Option(metavar="FOLDER", exists=True, help="Text to train on.", show_default="Python's standard library"),
]
PatternOption = Annotated[str, typer.Option(metavar="GLOB", help="Names of the files below it.")]
SamplesOption = Annotated[
    int | None, typer.Option(metavar="N", min=4096, help="Train on so many tokens that the target writes instead.")
]
MinutesOption = Annotated[
    float,
    typer.Option(
        metavar="M",
        min=0.01,
        help="How long it learns, if it improves for so long: reading or writing text, and trying it, is not counted.",
    ),
]
SeedOption = Annotated[
    int, typer.Option(metavar="N", min=0, max=(1 << 32) - 1, help="The same seed sees the same text.")
]
