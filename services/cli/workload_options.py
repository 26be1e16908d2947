"""Options that describe a load, the same for one that is simulated and one that is sent."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

BurstinessOption = Annotated[
    float,
    typer.Option(
        metavar="CV", min=0, max=100, help="Variation of the time between two: 0 regular, 1 Poisson, above: bursts."
    ),
]
PromptTokensOption = Annotated[
    float, typer.Option(metavar="N", min=1, max=1e9, help="Mean tokens of a prompt, without its shared prefix.")
]
OutputTokensOption = Annotated[float, typer.Option(metavar="N", min=1, max=1e9, help="Mean tokens of an output.")]
VariationOption = Annotated[
    float, typer.Option(metavar="CV", min=0, max=100, help="Their standard deviation, as a share of the mean.")
]
PrefixesOption = Annotated[int, typer.Option(metavar="N", min=0, help="How many shared system prompts there are.")]
PrefixTokensOption = Annotated[int, typer.Option(metavar="N", min=1, help="Tokens of each.")]
PrefixShareOption = Annotated[
    float, typer.Option(metavar="SHARE", min=0, max=1, help="Share of the prompts that begin with one.")
]
ZipfOption = Annotated[float, typer.Option(metavar="X", min=0, help="The r-th of them is as popular as 1 / r^X.")]
SloTtftOption = Annotated[float, typer.Option(metavar="SECONDS", min=0, help="Time to first token, at most.")]
SloTpotOption = Annotated[float, typer.Option(metavar="SECONDS", min=0, help="Time per output token, at most.")]
JsonOption = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the result there as JSON.")]


def reject_missing_folders(**files: Path | None) -> None:
    """Before all the work, not behind it. Raises ValueError, which names the option, as `--json`."""
    for option, path in files.items():
        if path is not None and not path.parent.is_dir():
            raise ValueError(f"--{option} {str(path)!r}: there is no folder {str(path.parent)!r}")
