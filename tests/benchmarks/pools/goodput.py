"""Requests a second within their SLOs: two workers that do both, and one that prefills for one that decodes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

from services.simulator.report import Objectives, summarise
from services.simulator.workload import Lengths, Request, Workload
from tests.benchmarks.measurement import OnStep
from tests.benchmarks.model_pair import Pair
from tests.benchmarks.pools.run import Numbers, Run
from tests.benchmarks.pools.setup import APART, COLOCATED, Setup, serving
from tests.benchmarks.pools.trace import draw_prompts, play
from tests.support.service import inference, wait_until_idle

SETUPS: Final = (COLOCATED, APART)
RATES: Final = (0.2, 0.35, 0.5, 0.7)
"""Requests a second."""

OBJECTIVES: Final = Objectives(ttft=4.0, tpot=0.1)
PROMPT_TOKENS: Final = Lengths(400, 0.5)
OUTPUT_TOKENS: Final = Lengths(48, 0.3)

COMPARED: Final[Numbers] = {
    "TTFT mean": lambda outcomes: summarise(outcomes, OBJECTIVES).ttft.mean,
    "TPOT mean": lambda outcomes: summarise(outcomes, OBJECTIVES).tpot.mean,
    "goodput": lambda outcomes: summarise(outcomes, OBJECTIVES).goodput,
}


async def measure_goodput(pair: Pair, seconds: float, seed: int, on_step: OnStep) -> list[Run]:
    """Serves the same traces, of so many seconds each, with each setup. Raises as `serving` and `play` do."""
    traces = {rate: trace(rate, seconds, seed) for rate in RATES}
    runs = []
    for setup in SETUPS:
        on_step(f"starting {setup.name}")
        async with serving(setup, pair) as stack, inference(stack) as stub:
            for rate, requests in traces.items():
                on_step(f"{len(requests)} requests, {rate:g} a second, {setup.name}: {requests[-1].time:.0f} s")
                texts = draw_prompts(requests, pair.prompts)
                served = await play(requests, texts, lambda place, request: stub)
                runs.append(Run(name_of(setup, rate), setup, tuple(served)))
                await wait_until_idle(stack)
    return runs


def trace(rate: float, seconds: float, seed: int) -> list[Request]:
    """As many requests as come in so many seconds on average."""
    workload = Workload(rate, max(2, round(rate * seconds)), PROMPT_TOKENS, OUTPUT_TOKENS)
    return list(workload.requests(seed))


def crossings(rates: Sequence[float], colocated: Sequence[float], apart: Sequence[float]) -> list[str]:
    """Between which rates the better of the two changes, by their goodput at each."""
    leads = [(rate, one - other) for rate, one, other in zip(rates, colocated, apart, strict=True) if one != other]
    return [
        f"between {before:g} and {after:g} requests a second: from there on {_better(lead)} is better"
        for (before, lead_before), (after, lead) in pairwise(leads)
        if (lead_before > 0) != (lead > 0)
    ]


def _better(lead: float) -> str:
    return COLOCATED.name if lead > 0 else APART.name


def name_of(setup: Setup, rate: float) -> str:
    return f"{setup.name}, {rate:g}/s"


def numbers_of(run: Run) -> dict[str, float]:
    """Requests a second within both SLOs, the share of requests that are; means in seconds."""
    summary = summarise(run.outcomes, OBJECTIVES)
    return {name: number(run.outcomes) for name, number in COMPARED.items()} | {"within SLOs": summary.attainment}
