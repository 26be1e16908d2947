"""The simulator on a trace that was served, and how far off it is."""

from __future__ import annotations

import math
from collections.abc import Sequence
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
# Steps vary at random: the median of so many simulations of all repeats.
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


def compare(runs: Sequence[Run], numbers: Numbers, transfer: TransferCosts) -> list[Comparison]:
    """Each of these numbers over the repeats of a run, on the very traces that were served, by the router's own policy.

    The simulator is told what a step of each repeat cost, by the tokens in it. When which step was taken with what in
    it, and so who waited for whom, is its own affair.
    """
    live = [run.outcomes for run in runs]
    before = [_machine(run) for run in runs]
    served = [_as_served(run, machine) for run, machine in zip(runs, before, strict=True)]
    simulated = [_simulate(runs, served, transfer, seed) for seed in range(_NUM_SEEDS)]
    from_warm_up = _simulate(runs, before, transfer, 0)
    return [
        Comparison(runs[0].name, what, number(live), median(map(number, simulated)), number(from_warm_up))
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


def _as_served(run: Run, machine: Machine) -> Machine:
    """With steps as they were in the run."""
    with_latency = replace(machine, latency_seconds=run.observed.latency_seconds)
    return as_logged(with_latency, run.observed.logs, one_machine=True)


def _simulate(runs: Sequence[Run], machines: Sequence[Machine], transfer: TransferCosts, seed: int) -> list[Outcomes]:
    """Of each repeat, with the machine as it was then."""
    outcomes = []
    for run, machine in zip(runs, machines, strict=True):
        bytes_per_token = run.observed.info.block_bytes / machine.block_size
        rates = TransferRates(bytes_per_token, transfer.fixed_seconds, transfer.bytes_per_second)
        outcomes.append(Cluster(run.setup.pools, machine, rates, run.routing, seed).run(run.requests))
    return outcomes


def _ratio(simulated: float, live: float) -> float:
    """Nothing is as much as nothing; NaN: there is something where there should be none."""
    if live == 0:
        return 1.0 if simulated == 0 else math.nan
    return simulated / live
