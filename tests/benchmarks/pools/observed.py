"""A stack whose target workers write their steps down, and what was seen of them while it served a trace."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from types import MappingProxyType

from outrider.v1 import worker_pb2

from services.cli.stack import Stack
from services.simulator.step_log import Step, read_step_log
from services.simulator.workload import Request
from tests.benchmarks.errors import BenchmarkError
from tests.benchmarks.model_pair import Pair
from tests.benchmarks.pools.setup import Setup, serving, worker_info
from tests.benchmarks.pools.trace import Choose, Served, play
from tests.support.service import inference, wait_until_idle

# Prompts of one token, one after another, before anything else: what a request takes beside its step.
_NUM_PROBES = 8


@dataclass(frozen=True, slots=True)
class Observed:
    """`logs`: the steps of each worker while a trace was served. `latency_seconds`: of a request's first token, beside
    the step it is computed in, while nothing else is served."""

    info: worker_pb2.WorkerInfo
    logs: tuple[tuple[Step, ...], ...]
    latency_seconds: float


@dataclass(frozen=True, slots=True)
class Watched:
    """A stack that serves traces one after another."""

    stack: Stack
    _folder: Path
    _info: worker_pb2.WorkerInfo
    _latency_seconds: float

    async def play(
        self,
        requests: Sequence[Request],
        texts: Sequence[list[int]],
        choose: Choose,
        cut_off: Mapping[int, float] = MappingProxyType({}),
    ) -> tuple[tuple[Served, ...], Observed]:
        """As `trace.play`, with what was seen. Returns when nothing is left of it. Raises BenchmarkError."""
        began = time.time()
        served = await play(requests, texts, choose, cut_off)
        await wait_until_idle(self.stack)
        return tuple(served), Observed(self._info, _logs(self._folder, began), self._latency_seconds)


@asynccontextmanager
async def watching(setup: Setup, pair: Pair) -> AsyncIterator[Watched]:
    """Runs the setup as `serving` does, and raises as that."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        environment = {worker: {"OUTRIDER_TARGET_STEP_LOG": str(folder / worker)} for worker in setup.workers}
        async with serving(setup, pair, environment) as stack:
            latency = await _latency(stack, pair, folder)
            yield Watched(stack, folder, await worker_info(stack, setup.workers[0]), latency)


async def _latency(stack: Stack, pair: Pair, folder: Path) -> float:
    async with inference(stack) as stub:
        beside = []
        for _ in range(_NUM_PROBES):
            began = time.time()
            [served] = await play([Request(0.0, 1, 1)], [pair.prompts(1)], lambda place, request: stub)
            await wait_until_idle(stack)
            steps = [step for log in _logs(folder, began) for step in log]
            if len(steps) != 1:
                raise BenchmarkError(f"a token took {len(steps)} steps")
            beside.append(served.token_times[0] - steps[0].seconds)
    return max(0.0, fmean(beside))


def _logs(folder: Path, began: float) -> tuple[tuple[Step, ...], ...]:
    """Steps that began since then. Raises CostsError."""
    return tuple(tuple(step for step in read_step_log(path) if step.time >= began) for path in sorted(folder.iterdir()))
