"""`make simulate`: the γ policy against the best fixed γ in hindsight, in simulation, over a grid of services.

python -m tests.benchmarks.gamma_grid --seeds 50
"""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from statistics import fmean

from rich.console import Console
from rich.progress import track
from rich.table import Table

from shared.policy.shape import Shape
from tests.support.speculation_simulator import Machine, Simulation, Workload

STREAMS = (1, 8, 32)
ACCEPTANCE_RATES = (0.2, 0.5, 0.7, 0.9)
DRAFT_RATIOS = (0.02, 0.1, 0.3)
PROMPT_TOKENS = (20, 500, 4000)
FIXED = (0, 1, 2, 3, 4, 6, 8)

# The policy should bring this share of what the best fixed γ does, on average and with the worst seed.
_LEAST_MEAN = 0.95
_LEAST_WORST = 0.90
# A fixed γ is the same from seed to seed but for luck: fewer seeds say how good it is on average.
_FIXED_SEEDS = 10


@dataclass(frozen=True, slots=True)
class Cell:
    """One service: `shared` says whether draft and target worker share their cores."""

    streams: int
    acceptance_rate: float
    draft_ratio: float
    prompt_tokens: int
    shared: bool

    def tokens_per_second(self, seed: int, gamma: int | None) -> float:
        """Over 60 simulated seconds; `gamma` None: as the controller chooses."""
        machine = Machine(self.draft_ratio, shared=self.shared)
        workload = Workload(lambda _: self.streams, lambda _: self.acceptance_rate, self.prompt_tokens)
        return Simulation(machine, workload, seed, None if gamma is None else Shape(gamma)).run()


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of a cell: the best fixed γ, what it brings on average, and the policy's share of that, mean and worst.

    Shares are taken seed by seed: the same requests come to both, on machines that drift and stall alike.
    """

    cell: Cell
    best_gamma: int
    best: float
    off: float
    mean: float
    worst: float


GRID = [
    Cell(*values) for values in itertools.product(STREAMS, ACCEPTANCE_RATES, DRAFT_RATIOS, PROMPT_TOKENS, (False, True))
]


def run_cell(cell: Cell, num_seeds: int, fixed: Sequence[int] = FIXED) -> Outcome:
    """Simulates the policy with that many seeds, and every fixed γ."""
    num_fixed = min(num_seeds, _FIXED_SEEDS)
    rates = {gamma: [cell.tokens_per_second(seed, gamma) for seed in range(num_fixed)] for gamma in fixed}
    best_gamma = max(fixed, key=lambda gamma: fmean(rates[gamma]))
    best = rates[best_gamma] + [cell.tokens_per_second(seed, best_gamma) for seed in range(num_fixed, num_seeds)]
    shares = [cell.tokens_per_second(seed, None) / best[seed] for seed in range(num_seeds)]
    return Outcome(cell, best_gamma, fmean(best), fmean(rates[0]), fmean(shares), min(shares))


def render(outcomes: Iterable[Outcome]) -> Table:
    """One line a cell, the worst mean first."""
    table = Table(title="γ policy over the best fixed γ", title_justify="left")
    for heading in (
        "streams",
        "α",
        "draft / target",
        "prompt",
        "cores",
        "best γ",
        "best",
        "off",
        "mean",
        "worst",
    ):
        table.add_column(heading, justify="right")
    for each in sorted(outcomes, key=lambda outcome: outcome.mean):
        cell = each.cell
        table.add_row(
            str(cell.streams),
            f"{cell.acceptance_rate:g}",
            f"{cell.draft_ratio:g}",
            str(cell.prompt_tokens),
            "shared" if cell.shared else "own",
            str(each.best_gamma),
            f"{each.best:.0f}",
            f"{each.off:.0f}",
            f"{each.mean:.3f}",
            f"{each.worst:.3f}",
        )
    return table


def _run(job: tuple[Cell, int]) -> Outcome:
    return run_cell(*job)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.gamma_grid", description=__doc__)
    parser.add_argument("--seeds", type=int, default=50, help="Simulations of the policy a cell; default 50.")
    options = parser.parse_args()
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        jobs = pool.map(_run, [(cell, options.seeds) for cell in GRID])
        outcomes = list(track(jobs, "simulating", len(GRID), console=Console(stderr=True)))
    Console(width=100).print(render(outcomes))
    means = [outcome.mean for outcome in outcomes]
    worst = [outcome.worst for outcome in outcomes]
    print(
        f"{len(outcomes)} cells, {options.seeds} seeds: mean {fmean(means):.3f}, least mean {min(means):.3f}; "
        f"{sum(mean < _LEAST_MEAN for mean in means)} means below {_LEAST_MEAN:g}, "
        f"least worst {min(worst):.3f}; {sum(seed < _LEAST_WORST for seed in worst)} worst seeds below {_LEAST_WORST:g}"
    )


if __name__ == "__main__":
    main()
