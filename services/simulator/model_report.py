"""How placements of several models went, for people and programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from rich.table import Table

from services.simulator.model import Model, Placement
from services.simulator.outcomes import Outcomes
from services.simulator.report import Summary, summarise


@dataclass(frozen=True, slots=True)
class PlacementRun:
    """A placement that was simulated: of each model, by name, its summary; of each worker, the names of its models."""

    workers: list[list[str]]
    models: dict[str, Summary]

    @property
    def attained(self) -> list[float]:
        """Of each model, the share of its requests within both SLOs."""
        return [summary.attainment for summary in self.models.values()]

    def as_json(self) -> dict[str, Any]:
        """As plain values; what there is nothing of is None."""
        return {
            "workers": self.workers,
            "least_attainment": min(self.attained),
            "mean_attainment": fmean(self.attained),
            "models": {name: summary.as_json() for name, summary in self.models.items()},
        }


def placement_run(models: Sequence[Model], placement: Placement, outcomes: Sequence[Outcomes]) -> PlacementRun:
    """`outcomes`: of each model, in their order."""
    return PlacementRun(
        [[models[number].name for number in placed] for placed in placement],
        {model.name: summarise(outcome, model.objectives) for model, outcome in zip(models, outcomes, strict=True)},
    )


def placement_table(runs: Mapping[str, PlacementRun]) -> Table:
    """A column for each placement, by its name: who is where, and what that attains."""
    made = Table("", *runs, box=None, header_style="bold")
    for column in made.columns[1:]:
        column.justify = "right"
    placed = list(runs.values())
    for worker in range(len(placed[0].workers)):
        made.add_row(f"worker-{worker}", *(" + ".join(run.workers[worker]) or "-" for run in placed))
    for name in placed[0].models:
        made.add_row(f"within both SLOs, {name}", *(f"{run.models[name].attainment:.1%}" for run in placed))
    made.add_row("least of the models", *(f"{min(run.attained):.1%}" for run in placed))
    made.add_row("mean of the models", *(f"{fmean(run.attained):.1%}" for run in placed))
    return made
