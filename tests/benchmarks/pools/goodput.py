"""Requests a second within their SLOs: two workers that do both, and one that prefills for one that decodes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean
from typing import Final

from services.simulator.outcomes import Outcomes
from services.simulator.report import Objectives
from services.simulator.workload import Lengths, Request, Workload
from tests.benchmarks.measurement import OnStep
from tests.benchmarks.model_pair import Pair
from tests.benchmarks.pools.observed import watching
from tests.benchmarks.pools.run import Numbers, Run
from tests.benchmarks.pools.setup import APART, COLOCATED, Setup
from tests.benchmarks.pools.trace import draw_prompts
from tests.support.service import inference

SETUPS: Final = (COLOCATED, APART)
RATES: Final = (0.5, 0.8, 1.1, 1.4)
"""Requests a second."""

# About five times what a request takes that is alone, a usual scale (AlpaServe).
OBJECTIVES: Final = Objectives(ttft=5.0, tpot=0.15)
# Goodput is the same that differs by no more: less than what one request of a trace is.
_AS_GOOD = 0.02

PROMPT_TOKENS: Final = Lengths(400, 0.5)
OUTPUT_TOKENS: Final = Lengths(48, 0.3)


def _num_good(several: Sequence[Outcomes]) -> int:
    return sum(each.num_good(*OBJECTIVES) for each in several)


COMPARED: Final[Numbers] = {
    "TTFT mean": lambda several: fmean(ttft for each in several for ttft in each.ttft),
    "TPOT mean": lambda several: fmean(tpot for each in several for tpot in each.tpot if not math.isnan(tpot)),
    "goodput": lambda several: _num_good(several) / sum(each.seconds for each in several),
}


async def measure_goodput(pair: Pair, seconds: float, seed: int, on_step: OnStep) -> list[Run]:
    """Serves the same traces, of so many seconds each, with each setup. Raises as `watching` and `play` do."""
    traces = {rate: trace(rate, seconds, seed) for rate in RATES}
    runs = []
    for setup in SETUPS:
        on_step(f"starting {setup.name}")
        async with watching(setup, pair) as watched, inference(watched.stack) as stub:
            for rate, requests in traces.items():
                on_step(f"{len(requests)} requests, {rate:g} a second, {setup.name}: {requests[-1].time:.0f} s")
                texts = draw_prompts(requests, pair.prompts)
                served, observed = await watched.play(requests, texts, lambda place, request: stub)
                runs.append(Run(name_of(setup, rate), setup, served, observed))
    return runs


def trace(rate: float, seconds: float, seed: int) -> list[Request]:
    """As many requests as come in so many seconds on average."""
    workload = Workload(rate, max(2, round(rate * seconds)), PROMPT_TOKENS, OUTPUT_TOKENS)
    return list(workload.requests(seed))


def verdict(rates: Sequence[float], colocated: Sequence[float], apart: Sequence[float]) -> str:
    """Which is better at which rates, by their goodput at each, and between which that changes."""
    leaders = [_leader(one, other) for one, other in zip(colocated, apart, strict=True)]
    told = "; ".join(f"{rate:g}/s: {leader or 'as good'}" for rate, leader in zip(rates, leaders, strict=True))
    decided = [(rate, leader) for rate, leader in zip(rates, leaders, strict=True) if leader]
    crossings = [
        f"between {before:g} and {after:g}/s" for (before, one), (after, other) in pairwise(decided) if one != other
    ]
    return f"better at {told}. They cross {' and '.join(crossings) or 'nowhere here'}."


def _leader(colocated: float, apart: float) -> str:
    """The setup with more goodput; empty if they are as good as the same."""
    if abs(colocated - apart) <= _AS_GOOD * max(colocated, apart):
        return ""
    return COLOCATED.name if colocated > apart else APART.name


def name_of(setup: Setup, rate: float) -> str:
    return f"{setup.name}, {rate:g}/s"


def numbers_of(runs: Sequence[Run]) -> dict[str, float]:
    """Requests a second within both SLOs, the share of requests that are; means in seconds."""
    several = [run.outcomes for run in runs]
    share = _num_good(several) / sum(each.num_requests for each in several)
    return {name: number(several) for name, number in COMPARED.items()} | {"within SLOs": share}
