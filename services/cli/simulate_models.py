"""`outrider simulate --models`: several models on shared workers, and the search for who holds which."""

from __future__ import annotations

from collections.abc import Sequence

import typer
from rich.console import Console

from services.simulator.model import Fleet, Model, Placement
from services.simulator.model_file import Description
from services.simulator.model_placement import dedicated, everywhere, greedy, merit
from services.simulator.model_report import PlacementRun, placement_run
from services.simulator.sharing import simulate_models

# Options that mean nothing to several models on shared workers.
_FOR_ONE_MODEL = (
    *("prefill", "decode", "attainment", "most_workers", "routing", "model", "step_log", "kv_tokens", "plot_file"),
)


def reject_options_for_one_model(context: typer.Context) -> None:
    """Raises ValueError if one was given."""
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name) if parameter.name in _FOR_ONE_MODEL else None
        if source is not None and source.name != "DEFAULT":
            raise ValueError(f"{parameter.opts[0]} is for one model, not for --models")


def defaults_for_models(context: typer.Context) -> dict[str, object]:
    """What a model has that its table leaves out: the options of the same names."""
    values = {name: context.params.get(name) for name in Description.model_fields}
    given = {name: value for name, value in values.items() if value is not None}
    return {**given, "step_costs": str(given["step_costs"])} if "step_costs" in given else given


def place_models(models: Sequence[Model], fleet: Fleet, seed: int, *, search: bool) -> dict[str, PlacementRun]:
    """Simulates the simple placements, by their names, and with `search` the best found; says so while it searches.

    What is found is never worse than the simple ones, for these are tried as well. Without a worker for each model
    there is no dedicated one.
    """
    runs: dict[Placement, PlacementRun] = {}
    with Console(stderr=True).status("simulating") as status:

        def attained(placement: Placement) -> list[float]:
            if placement not in runs:
                outcomes = simulate_models(models, placement, fleet, seed)
                runs[placement] = placement_run(models, placement, outcomes)
                best = max(map(merit, (run.attained for run in runs.values())))
                status.update(f"{len(runs)} placements tried, at best {min(best):.1%} of each model's requests in time")
            return runs[placement].attained

        named = {"everywhere": everywhere(models, fleet)}
        if (separate := dedicated(models, fleet)) is not None:
            named = {"dedicated": separate, **named}
        if search:
            found = greedy(models, fleet, attained)
            named["found"] = max([found, *named.values()], key=lambda placement: merit(attained(placement)))
        for placement in named.values():
            attained(placement)
    return {name: runs[placement] for name, placement in named.items()}
