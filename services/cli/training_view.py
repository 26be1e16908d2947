"""A training as it is seen: its progress, and the card that it leaves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as ProgressBar
from rich.table import Table

if TYPE_CHECKING:
    from shared.training.samples import Writing
    from shared.training.session import MadeDraft, MadeHead, OnProgress
    from shared.training.trainer import Progress

_WIDTH = 24
_EIGHTHS = " ▏▎▍▌▋▊▉█"


@contextmanager
def following(console: Console, name: str) -> Iterator[OnProgress]:
    """What to tell of a training's progress: a bar moves, or where none can, there is a line whenever more is known.
    Who breaks it off is told how it goes on."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    said: object = None
    with ProgressBar(*columns, console=console) as bar:
        task = bar.add_task(name, total=1.0)

        def on_progress(progress: Writing | Progress) -> None:
            nonlocal said
            bar.update(task, completed=progress.share, description=f"{name}: {progress}")
            if not console.is_terminal and progress.news != said:
                said = progress.news
                console.print(f"{progress.share:.0%} {name}: {progress}")

        try:
            yield on_progress
        except KeyboardInterrupt:
            console.print("broken off: the same command goes on from what it has kept")
            raise


def write_head_card(folder: Path, kind: str, made: MadeHead) -> Table:
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


def write_draft_card(folder: Path, made: MadeDraft) -> Table:
    """As `write_head_card`."""
    facts = {
        "parameters": f"{made.num_parameters / 1e6:.1f}M",
        "greedy agreement": f"{made.agreement:.3f}",
        "acceptance at temperature 1": f"{made.acceptance:.3f}",
    }
    lines = [
        f"# A draft of {made.target}",
        "",
        f"Made by `outrider distill`, for `outrider draft --model` beside {made.target}. Along held-out text:",
        "",
        "| | |",
        "| --- | --- |",
        *(f"| {name} | {value} |" for name, value in facts.items()),
        "",
    ]
    (folder / "README.md").write_text("\n".join(lines))
    table = Table(box=None, show_header=False, caption=str(folder / "README.md"))
    for name, value in facts.items():
        table.add_row(name, value)
    return table


def _bar(share: float) -> str:
    eighths = round(share * _WIDTH * 8)
    return (_EIGHTHS[-1] * (eighths // 8) + _EIGHTHS[eighths % 8]).rstrip().ljust(_WIDTH)
