"""The γ controller, driven by a simulation of the service it chooses for."""

from __future__ import annotations

from statistics import median

import pytest

from shared.policy.shape import PLAIN
from tests.benchmarks.gamma_grid import Cell, run_cell
from tests.support.speculation_simulator import Machine, Simulation, Workload


def run(
    workload: Workload, draft_ratio: float, slow: tuple[float, float, float] = (0.0, 0.0, 1.0), seed: int = 0
) -> Simulation:
    simulation = Simulation(Machine(draft_ratio), workload, seed, slow=slow)
    simulation.run()
    return simulation


def share_drafted(simulation: Simulation, since: float, until: float) -> float:
    """Share of the results between two moments that came of rounds."""
    gammas = [gamma for when, gamma in simulation.trace if since <= when < until]
    return sum(gamma > 0 for gamma in gammas) / len(gammas)


@pytest.mark.parametrize(
    "cell",
    [
        Cell(1, 0.7, 0.1, 20, shared=True),
        Cell(1, 0.9, 0.02, 500, shared=False),
        Cell(1, 0.2, 0.3, 500, shared=True),
        Cell(8, 0.7, 0.1, 20, shared=True),
        Cell(8, 0.9, 0.02, 500, shared=False),
        Cell(8, 0.2, 0.3, 20, shared=False),
        Cell(1, 0.9, 0.1, 4000, shared=False),
        Cell(32, 0.2, 0.3, 500, shared=True),
        Cell(32, 0.9, 0.02, 20, shared=True),
    ],
    ids=str,
)
def test_the_policy_comes_close_to_the_best_fixed_gamma(cell: Cell) -> None:
    outcome = run_cell(cell, 2, (0, 1, 2, 4, 8))
    assert outcome.mean >= 0.95
    assert outcome.worst >= 0.90


def test_beside_long_prompts_nobody_waits_for_those_that_decode_plainly() -> None:
    cell = Cell(8, 0.2, 0.02, 4000, shared=False)
    assert cell.tokens_per_second(5, None) >= 0.95 * cell.tokens_per_second(5, 0)


@pytest.mark.parametrize("streams", [1, 8])
def test_a_tenfold_slow_round_does_not_end_drafting(streams: int) -> None:
    workload = Workload(lambda _: streams, lambda _: 0.8, 20, seconds=16)
    simulation = run(workload, 0.1, slow=(10.0, 10.04, 10.0))
    assert share_drafted(simulation, 8, 10) > 0.9
    assert share_drafted(simulation, 12, 14) > 0.9


def test_gamma_follows_the_load() -> None:
    """Alone it pays to draft; with 64 streams a round takes far longer than it brings, and it is over at once."""
    workload = Workload(lambda now: 64 if 10 <= now < 20 else 1, lambda _: 0.6, 20, seconds=60)
    simulation = run(workload, 0.2)
    assert share_drafted(simulation, 5, 10) > 0.8
    assert share_drafted(simulation, 13, 20) < 0.1
    assert share_drafted(simulation, 45, 60) > 0.8


def test_gamma_follows_acceptance() -> None:
    workload = Workload(lambda _: 1, lambda now: 0.1 if 15 <= now < 40 else 0.9, 20, seconds=90)
    simulations = [run(workload, 0.2, seed=seed) for seed in range(5)]

    def share(since: float, until: float) -> float:
        return median(share_drafted(each, since, until) for each in simulations)

    assert share(5, 15) > 0.9
    assert share(25, 40) < 0.2
    assert share(75, 90) > 0.9, "scouts found that it pays again"


@pytest.mark.parametrize(("ratio", "rate"), [(0.3, 0.0), (0.9, 0.3)])
def test_what_never_pays_takes_little(ratio: float, rate: float) -> None:
    workload = Workload(lambda _: 4, lambda _: rate, 100)
    simulation, off = run(workload, ratio), Simulation(Machine(ratio), workload, 0, PLAIN)
    assert simulation.tokens >= 0.95 * (off.run() * workload.seconds)
    assert share_drafted(simulation, 20, 60) < 0.03
