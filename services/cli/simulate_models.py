"""`outrider simulate --models`: several models on shared workers, and the search for who holds which."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from services.simulator.model import Fleet, Model, Placement
from services.simulator.model_placement import dedicated, everywhere, greedy, merit
from services.simulator.model_report import PlacementRun, placement_run
from services.simulator.sharing import simulate_models


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
