"""Streams that run beside what a trace sends later, served by one setup after another."""

from __future__ import annotations

from collections.abc import Sequence

from services.simulator.workload import Request
from tests.benchmarks.measurement import OnStep
from tests.benchmarks.model_pair import Pair
from tests.benchmarks.pools.observed import watching
from tests.benchmarks.pools.run import Run
from tests.benchmarks.pools.setup import Setup
from tests.benchmarks.pools.trace import draw_prompts
from tests.support.service import inference


async def serve_beside_streams(
    setups: Sequence[Setup],
    pair: Pair,
    requests: Sequence[Request],
    num_streams: int,
    end: float,
    what: str,
    on_step: OnStep,
) -> list[Run]:
    """Serves the trace, named `what`, with each setup; its first `num_streams` requests are cut off after `end`
    seconds. Raises as `watching` and `play` do."""
    runs = []
    for setup in setups:
        on_step(f"starting {setup.name}")
        async with watching(setup, pair) as watched, inference(watched.stack) as stub:
            on_step(f"{what}, {setup.name}: {end:.0f} s")
            texts = draw_prompts(requests, pair.prompts)
            cut_off = dict.fromkeys(range(num_streams), end)
            served, observed = await watched.play(requests, texts, lambda place, request: stub, cut_off)
        runs.append(Run(setup.name, setup, served, observed))
    return runs
