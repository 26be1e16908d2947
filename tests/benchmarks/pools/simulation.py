"""The simulator on a trace that was served, and how far off it is."""

from __future__ import annotations

import math
from contextlib import AsyncExitStack
from dataclasses import dataclass

from outrider.v1 import worker_pb2

from services.simulator.cluster import Cluster, Pools
from services.simulator.machine import Machine
from services.simulator.outcomes import Outcomes
from shared.policy.placement import TransferRates
from shared.policy.step_costs import StepCosts
from tests.benchmarks.measurement import OnStep
from tests.benchmarks.model_pair import Pair
from tests.benchmarks.pools.calibration import Calibration, Costs, busy, calibrate
from tests.benchmarks.pools.run import Numbers, Run
from tests.benchmarks.pools.setup import COLOCATED, Setup, serving, worker_info
from tests.benchmarks.pools.transfer import TransferCosts
from tests.benchmarks.second_router import second_router
from tests.support.service import inference

_ALONE = Setup("1 both", Pools(num_both=1), num_threads=2, max_batch_tokens=2048)
# As the workers' own default.
_MAX_SEQUENCES = 256
# Steps that are simulated at once: contexts hardly grow in so many.
_LONGEST_RUN = 16


@dataclass(frozen=True, slots=True)
class Comparison:
    """A number of a run as it was measured, as it was simulated, and as it would have been if steps took what the
    workers measured at warm-up."""

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


@dataclass(frozen=True, slots=True)
class Model:
    """All that the simulator is told of this machine: what workers say of themselves, and what was measured.

    `calibration`: of a worker while no other computes; `shared_costs`: its steps while another does, if there is one.
    """

    info: worker_pb2.WorkerInfo
    calibration: Calibration
    transfer: TransferCosts
    shared_costs: Costs | None = None

    def compare(self, run: Run, numbers: Numbers) -> list[Comparison]:
        """Each of these numbers, on the very trace that was served."""
        live, simulated = run.outcomes, self._simulate(run, self.calibration, self.shared_costs)
        from_warm_up = self._simulate(run, Calibration(self.at_warm_up, 0.0, 0.0, 0.0), None)
        return [
            Comparison(run.name, what, number(live), number(simulated), number(from_warm_up))
            for what, number in numbers.items()
        ]

    @property
    def at_warm_up(self) -> Costs:
        """Seconds of a step by its tokens, as the worker measured them before it served."""
        return tuple((cost.num_tokens, cost.seconds) for cost in self.info.step_costs)

    def warm_up_seconds(self) -> list[float]:
        """What steps of the sizes in the calibration would take by that."""
        costs = StepCosts(self.at_warm_up)
        return [costs.seconds(tokens) for tokens, _ in self.calibration.costs]

    def _simulate(self, run: Run, calibration: Calibration, shared_costs: Costs | None) -> Outcomes:
        setup = run.setup
        machine = Machine(
            StepCosts(calibration.costs),
            setup.max_batch_tokens,
            min(_MAX_SEQUENCES, setup.max_batch_tokens),
            self.info.num_blocks,
            self.info.block_size,
            StepCosts(shared_costs) if shared_costs is not None else None,
            calibration.attention_seconds,
            calibration.context_seconds,
            calibration.latency_seconds,
            _LONGEST_RUN,
        )
        bytes_per_token = self.info.block_bytes / self.info.block_size
        rates = TransferRates(bytes_per_token, self.transfer.fixed_seconds, self.transfer.bytes_per_second)
        return Cluster(setup.pools, machine, rates, run.routing).run(run.requests)


async def measure_models(pair: Pair, transfer: TransferCosts, turns: int, on_step: OnStep) -> dict[int, Model]:
    """By the threads of a worker: of one that has both cores, and of one that has a core beside another.

    Raises as `serving` and `calibrate` do.
    """
    models = {}
    on_step("starting a worker of two threads")
    async with serving(_ALONE, pair) as stack, inference(stack) as stub:
        on_step("steps of two threads")
        alone = await calibrate(stub, pair.prompts, _ALONE.max_batch_tokens, turns)
        models[_ALONE.num_threads] = Model(await worker_info(stack, _ALONE.workers[0]), alone, transfer)
    on_step("starting two workers of a thread")
    async with serving(COLOCATED, pair) as stack, AsyncExitStack() as routers:
        one, other = [await routers.enter_async_context(second_router(stack, [name])) for name in COLOCATED.workers]
        info, most = await worker_info(stack, COLOCATED.workers[0]), COLOCATED.max_batch_tokens
        on_step("steps of one thread")
        alone = await calibrate(one, pair.prompts, most, turns)
        on_step("steps of one thread beside a busy worker")
        async with busy(other, pair.prompts):
            beside = await calibrate(one, pair.prompts, most, turns)
        models[COLOCATED.num_threads] = Model(info, alone, transfer, beside.costs)
    return models


def _ratio(simulated: float, live: float) -> float:
    """Nothing is as much as nothing; NaN: there is something where there should be none."""
    if live == 0:
        return 1.0 if simulated == 0 else math.nan
    return simulated / live
