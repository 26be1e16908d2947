"""Which models on which workers: simple placements, and those that are searched for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.cli.simulate_models import place_models
from services.simulator.costs import linear_costs
from services.simulator.model import Model, Placement
from services.simulator.model_placement import dedicated, everywhere, greedy, merit
from services.simulator.report import Objectives
from services.simulator.workload import Lengths, Request, Workload
from tests.support.simulated_models import FLEET, KV_BYTES, a_model, busy


def small(names: str, **weights: float) -> list[Model]:
    return [a_model(name, [Request(0.0, 100, 10)], weights_gib=weights.get(name, 10.0)) for name in names]


def test_dedicated_workers_go_by_load() -> None:
    models = [a_model(name, [Request(0.0, 100, 10)] * number) for name, number in (("a", 60), ("b", 20), ("c", 1))]
    assert dedicated(models, replace(FLEET, num_workers=8)) == ((0,),) * 5 + ((1,),) * 2 + ((2,),)
    assert dedicated(models, replace(FLEET, num_workers=3)) == ((0,), (1,), (2,))
    assert dedicated(models, FLEET) is None


def test_everywhere_is_as_far_as_there_is_room() -> None:
    assert everywhere(small("abc"), FLEET) == ((0, 1, 2), (0, 1, 2))
    # Two of three: each worker begins with another one, so that none is left out.
    tight = replace(FLEET, num_workers=3, worker_gib=21.0)
    assert everywhere(small("abc"), tight) == ((0, 1), (0, 2), (1, 2))
    assert everywhere(small("ab", a=20.0), tight) == ((0,), (0,), (1,))


def test_the_search_keeps_to_the_memory_and_finds_what_each_model_needs() -> None:
    """With attainments that are known: a model needs so many workers, and loses a little with each neighbour."""
    models, needs = small("abc", a=20.0), (3, 2, 1)
    fleet = replace(FLEET, num_workers=4, worker_gib=31.0)
    tried: list[Placement] = []

    def attainments(placement: Placement) -> list[float]:
        tried.append(placement)
        held = [sum(number in placed for placed in placement) for number in range(3)]
        return [min(1.0, held[number] / needs[number]) - 0.01 * held.count(4) for number in range(3)]

    found = greedy(models, fleet, attainments)
    assert [sum(number in placed for placed in found) >= needs[number] for number in range(3)] == [True] * 3
    assert all(fleet.holds([models[number] for number in placed]) for each in tried for placed in each)
    assert len(tried) == len(set(tried)) < 60


def test_the_least_attainment_counts_first() -> None:
    assert merit([0.9, 0.2]) < merit([0.3, 0.3]) < merit([0.4, 0.3])


def loads(rate: float, burstiness: float, seed: int) -> list[Model]:
    workload = Workload(rate, 500, Lengths(500, 0.5), Lengths(100, 0.5), burstiness)
    return [
        Model(name, linear_costs(0.02, 10_000, 512), 16.0, KV_BYTES, list(workload.requests(f"{seed} {name}")), each)
        for name, each in (("a", Objectives(1.0, 0.1)), ("b", Objectives(1.0, 0.1)))
    ]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_bursts_are_served_better_by_shared_workers(seed: int) -> None:
    """AlpaServe's point: the same hardware, and bursts that do not come together."""
    runs = place_models(loads(2.0, 6.0, seed), FLEET, seed, search=True)
    assert min(runs["everywhere"].attained) > min(runs["dedicated"].attained) + 0.03
    assert sum(runs["everywhere"].attained) > sum(runs["dedicated"].attained) + 0.06
    assert min(runs["found"].attained) >= min(runs["everywhere"].attained)
    assert ["a", "b"] in runs["found"].workers


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_steady_loads_that_fill_the_workers_are_not(seed: int) -> None:
    runs = place_models(loads(12.5, 1.0, seed), FLEET, seed, search=True)
    assert max(runs["dedicated"].attained) < 0.9
    assert min(runs["everywhere"].attained) <= min(runs["dedicated"].attained)
    assert sum(runs["everywhere"].attained) <= sum(runs["dedicated"].attained)


@pytest.mark.parametrize("seed", [0, 1])
def test_what_is_found_is_no_worse_than_the_simple_placements(seed: int) -> None:
    rates = {"a": 6.0, "b": 2.0, "c": 0.7}
    models = [
        a_model(name, busy(int(15 * rate), rate, f"{seed} {name}", 3.0), slow=name == "c")
        for name, rate in rates.items()
    ]
    models = [replace(model, objectives=Objectives(0.4, 0.05)) for model in models]
    fleet = replace(FLEET, num_workers=3, worker_gib=40.0)
    runs = place_models(models, fleet, seed, search=True)
    assert list(runs) == ["dedicated", "everywhere", "found"]
    assert all(merit(runs["found"].attained) >= merit(each.attained) for each in runs.values())
    assert "found" not in place_models(models, fleet, seed, search=False)
