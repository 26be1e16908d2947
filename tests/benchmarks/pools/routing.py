"""Shared system prompts over two workers: round robin, pure affinity, and the router's own policy.

The first two need nothing of the product: a router for each worker alone, and a client that chooses the router.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack
from itertools import chain
from statistics import fmean
from typing import Final

from services.cli.stack import Stack
from services.simulator.outcomes import Outcomes, quantiles
from services.simulator.routing import RoutingName
from services.simulator.workload import Lengths, Request, SharedPrefixes, Workload
from tests.benchmarks.measurement import OnStep
from tests.benchmarks.model_pair import Pair
from tests.benchmarks.pools.observed import watching
from tests.benchmarks.pools.run import Numbers, Run
from tests.benchmarks.pools.setup import COLOCATED
from tests.benchmarks.pools.trace import Choose, draw_prompts
from tests.benchmarks.second_router import second_router
from tests.support.service import inference

ROUTINGS: Final = (RoutingName.ROUND_ROBIN, RoutingName.AFFINITY, RoutingName.POLICY)
PREFIXES: Final = SharedPrefixes(count=8, num_tokens=512)
RATE: Final = 2.5
"""Requests a second."""

_OWN_TOKENS = Lengths(48, 0.3)
_OUTPUT_TOKENS = Lengths(16, 0.3)


def _ttfts(several: Sequence[Outcomes]) -> Iterable[float]:
    return chain.from_iterable(each.ttft for each in several)


COMPARED: Final[Numbers] = {
    "TTFT mean": lambda several: fmean(_ttfts(several)),
    "TTFT p50": lambda several: quantiles(_ttfts(several), (0.5,))[0],
    "TTFT p99": lambda several: quantiles(_ttfts(several), (0.99,))[0],
}


async def measure_routing(pair: Pair, num_requests: int, seed: int, on_step: OnStep) -> list[Run]:
    """Serves the same trace under each routing, each on workers just started. Raises as `watching` and `play` do."""
    requests = list(Workload(RATE, num_requests, _OWN_TOKENS, _OUTPUT_TOKENS, prefixes=PREFIXES).requests(seed))
    texts = draw_prompts(requests, pair.prompts)
    runs = []
    for routing in ROUTINGS:
        on_step(f"starting 2 workers for {routing}")
        async with watching(COLOCATED, pair) as watched, AsyncExitStack() as routers:
            choose = await _chooser(watched.stack, routing, routers)
            on_step(f"{num_requests} requests by {routing}: {requests[-1].time:.0f} s")
            served, observed = await watched.play(requests, texts, choose)
        runs.append(Run(routing.value, COLOCATED, served, observed, routing))
    return runs


def numbers_of(runs: Sequence[Run]) -> dict[str, float]:
    """TTFT in seconds, and the share of prompt tokens that were cached where they were computed."""
    several = [run.outcomes for run in runs]
    hit = sum(each.cached_tokens for each in several) / sum(each.prompt_tokens for each in several)
    return {name: number(several) for name, number in COMPARED.items()} | {"prefix hit": hit}


async def _chooser(stack: Stack, routing: RoutingName, routers: AsyncExitStack) -> Choose:
    if routing == RoutingName.POLICY:
        stub = await routers.enter_async_context(inference(stack))
        return lambda place, request: stub
    stubs = [await routers.enter_async_context(second_router(stack, [name])) for name in COLOCATED.workers]
    if routing == RoutingName.ROUND_ROBIN:
        return lambda place, request: stubs[place % len(stubs)]
    return lambda place, request: stubs[_home(request) % len(stubs)]


def _home(request: Request) -> int:
    """As in the simulator: every prefix has its worker, by its name."""
    assert request.prefix_id is not None
    return zlib.crc32(request.prefix_id.encode())
