"""What came of a training: a model card, and the same for the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

if TYPE_CHECKING:
    from shared.training.session import Made

_WIDTH = 24
_EIGHTHS = " ▏▎▍▌▋▊▉█"


def write_card(folder: Path, kind: str, made: Made) -> Table:
    """Writes README.md into the folder; returns the table that is in it."""
    trial = made.trial
    rows = list(zip(made.agreements, trial.by_depth, strict=True))
    lines = [
        f"# A head of kind {kind} for {made.target}",
        "",
        f"Made by `outrider train-head`; for `--head` of a target worker that serves {made.target}.",
        "",
        f"In service, greedy and in chains of {len(rows)}, behind {made.num_prompts} held-out texts, it brings",
        f"{trial.tokens_per_step:.2f} tokens a step. At each depth: of the draft tokens whose turn came, the share",
        "that was accepted there; and how often it agreed with the target along held-out text.",
        "",
        "| depth | accepted | | agreed on text |",
        "| --- | --- | --- | --- |",
        *(f"| {i} | {got:.2f} | `{_bar(got)}` | {said:.2f} |" for i, (said, got) in enumerate(rows, 1)),
        "",
    ]
    (folder / "README.md").write_text("\n".join(lines))
    table = Table("depth", "accepted", "", "agreed on text", box=None)
    for i, (said, got) in enumerate(rows, 1):
        table.add_row(str(i), f"{got:.2f}", _bar(got), f"{said:.2f}")
    table.caption = f"{trial.tokens_per_step:.2f} tokens a step in service; {folder / 'README.md'}"
    return table


def _bar(share: float) -> str:
    eighths = round(share * _WIDTH * 8)
    return (_EIGHTHS[-1] * (eighths // 8) + _EIGHTHS[eighths % 8]).rstrip().ljust(_WIDTH)
