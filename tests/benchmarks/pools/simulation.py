"""The simulator on a trace that was served, and how far off it is."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import median

from services.simulator.cluster import Cluster
from services.simulator.machine import Machine
from services.simulator.outcomes import Outcomes
from services.simulator.step_fit import Fitted, as_logged, fit_steps
from shared.policy.placement import TransferRates
from shared.policy.step_costs import StepCosts
from tests.benchmarks.pools.run import Numbers, Run
from tests.benchmarks.pools.transfer import TransferCosts

# As the workers' own default.
_MAX_SEQUENCES = 256
# Steps vary at random: medians over so many simulations.
_NUM_SEEDS = 9


@dataclass(frozen=True, slots=True)
class Comparison:
    """A number of a run as it was measured, as it was simulated with what steps took in it, and as it would have been
    if they took what the workers measured at warm-up."""

    run: str
    what: str
    live: float
    simulated: float
    from_warm_up: float

    @property
    def ratio(self) -> float:
        """Simulated over measured."""
        return _ratio(self.simulated, self.live)

    @property
    def ratio_from_warm_up(self) -> float:
        return _ratio(self.from_warm_up, self.live)


def compare(run: Run, numbers: Numbers, transfer: TransferCosts) -> list[Comparison]:
    """Each of these numbers, on the very trace that was served, by the router's own policy.

    The simulator is told what a step of this run cost, by the tokens in it. When which step was taken with what in it,
    and so who waited for whom, is its own affair.
    """
    live = run.outcomes
    before = _machine(run)
    served = as_logged(
        replace(before, latency_seconds=run.observed.latency_seconds), run.observed.logs, one_machine=True
    )
    simulated = [_simulate(run, served, transfer, seed) for seed in range(_NUM_SEEDS)]
    from_warm_up = _simulate(run, before, transfer, 0)
    return [
        Comparison(run.name, what, number(live), median(map(number, simulated)), number(from_warm_up))
        for what, number in numbers.items()
    ]


def steps_of(run: Run) -> Fitted:
    """What steps cost in the run."""
    return fit_steps(run.observed.logs, one_machine=True)


def at_warm_up(run: Run) -> list[tuple[int, float]]:
    """Seconds of a step by its tokens, as a worker measured them before it served."""
    return [(cost.num_tokens, cost.seconds) for cost in run.observed.info.step_costs]


def _machine(run: Run) -> Machine:
    """The run's workers, by what they say of themselves before they serve."""
    most, info = run.setup.max_batch_tokens, run.observed.info
    return Machine(StepCosts(at_warm_up(run)), most, min(_MAX_SEQUENCES, most), info.num_blocks, info.block_size)


def _simulate(run: Run, machine: Machine, transfer: TransferCosts, seed: int) -> Outcomes:
    bytes_per_token = run.observed.info.block_bytes / machine.block_size
    rates = TransferRates(bytes_per_token, transfer.fixed_seconds, transfer.bytes_per_second)
    return Cluster(run.setup.pools, machine, rates, run.routing, seed).run(run.requests)


def _ratio(simulated: float, live: float) -> float:
    """Nothing is as much as nothing; NaN: there is something where there should be none."""
    if live == 0:
        return 1.0 if simulated == 0 else math.nan
    return simulated / live
