"""How simulations went, for people and programs: numbers, a table, a picture."""

from __future__ import annotations

import importlib
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from rich.table import Table

from services.simulator.outcomes import Outcomes, quantiles, weighted_quantiles

_SHARES = (0.5, 0.9, 0.99)


class PlotUnavailable(Exception):
    """There is nothing to draw with."""


class Objectives(NamedTuple):
    """The SLOs, in seconds: TTFT, and TPOT after it."""

    ttft: float
    tpot: float


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean and percentiles, in seconds; NaN of nothing."""

    mean: float
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, slots=True)
class WorkerSummary:
    """`utilisation`: share of the time in steps."""

    worker: str
    role: str
    utilisation: float
    preemptions: int


@dataclass(frozen=True, slots=True)
class Summary:
    """One simulation in numbers. Rates are per second, over `seconds` from the first arrival to the last token.

    `attainment`: share of the requests that met both SLOs; `goodput`: those, a second. `prefix_hit_rate`: share of the
    prompt tokens that were found on the worker that prefills, or fetched for it.
    """

    requests: int
    seconds: float
    requests_per_second: float
    output_tokens_per_second: float
    ttft: Spread
    tpot: Spread
    inter_token: Spread
    slo_ttft: float
    slo_tpot: float
    attainment: float
    goodput: float
    prefix_hit_rate: float
    preemptions: int
    workers: list[WorkerSummary]

    def as_json(self) -> dict[str, Any]:
        """As plain values; what there is nothing of is None."""
        values: dict[str, Any] = _without_nans(asdict(self))
        return values


def summarise(outcomes: Outcomes, objectives: Objectives) -> Summary:
    seconds = max(outcomes.seconds, 1e-9)
    num_good = outcomes.num_good(*objectives)
    return Summary(
        requests=outcomes.num_requests,
        seconds=outcomes.seconds,
        requests_per_second=outcomes.num_requests / seconds,
        output_tokens_per_second=outcomes.num_output_tokens / seconds,
        ttft=_spread(outcomes.ttft.tolist()),
        tpot=_spread(outcomes.tpot.tolist()),
        inter_token=_weighted_spread(outcomes.inter_token),
        slo_ttft=objectives.ttft,
        slo_tpot=objectives.tpot,
        attainment=num_good / max(1, outcomes.num_requests),
        goodput=num_good / seconds,
        prefix_hit_rate=outcomes.cached_tokens / max(1, outcomes.prompt_tokens),
        preemptions=sum(worker.num_preemptions for worker in outcomes.workers),
        workers=[
            WorkerSummary(worker.worker_id, worker.role, worker.busy_seconds / seconds, worker.num_preemptions)
            for worker in outcomes.workers
        ],
    )


def table(summaries: Mapping[str, Summary], *, workers: bool = True) -> Table:
    """A column for each simulation, by its name; `workers`: with what they did."""
    made = Table("", *summaries, box=None, header_style="bold")
    for column in made.columns[1:]:
        column.justify = "right"
    runs = list(summaries.values())
    made.add_row("requests/s", *(f"{run.requests_per_second:.2f}" for run in runs))
    made.add_row("output tokens/s", *(f"{run.output_tokens_per_second:.0f}" for run in runs))
    for name, spreads in (
        ("TTFT", [run.ttft for run in runs]),
        ("TPOT", [run.tpot for run in runs]),
        ("inter-token", [run.inter_token for run in runs]),
    ):
        for percentile in ("p50", "p90", "p99"):
            made.add_row(f"{name} {percentile}", *(_milliseconds(getattr(spread, percentile)) for spread in spreads))
    made.add_row("within both SLOs", *(f"{run.attainment:.1%}" for run in runs))
    made.add_row("goodput, requests/s", *(f"{run.goodput:.2f}" for run in runs))
    made.add_row("prefix hit", *(f"{run.prefix_hit_rate:.1%}" for run in runs))
    if not workers:
        return made
    made.add_row("preemptions", *(str(run.preemptions) for run in runs))
    roles = dict.fromkeys(worker.role for run in runs for worker in run.workers)
    for role in roles:
        busy = ([worker.utilisation for worker in run.workers if worker.role == role] for run in runs)
        made.add_row(f"busy, {role}", *(f"{fmean(shares):.0%}" if shares else "-" for shares in busy))
    return made


def drawing() -> Any:
    """The module of matplotlib that pictures are made with. Raises PlotUnavailable if it is not installed."""
    try:
        return importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise PlotUnavailable("a plot needs matplotlib, which is not installed: pip install matplotlib") from error


def plot(path: Path, runs: Mapping[str, Outcomes], objectives: Objectives) -> None:
    """Draws how TTFT, TPOT and inter-token latency are distributed, as a PNG. Raises PlotUnavailable."""
    figure = drawing().Figure(figsize=(15, 4.5), layout="constrained")
    tpot = {name: [value for value in run.tpot if not math.isnan(value)] for name, run in runs.items()}
    panels: tuple[tuple[str, float | None, dict[str, Mapping[float, int]]], ...] = (
        ("TTFT", objectives.ttft, {name: Counter(run.ttft) for name, run in runs.items()}),
        ("TPOT", objectives.tpot, {name: Counter(values) for name, values in tpot.items()}),
        ("inter-token latency", None, {name: run.inter_token for name, run in runs.items()}),
    )
    for axes, (title, objective, weights) in zip(figure.subplots(1, 3), panels, strict=True):
        for name in runs:
            axes.step(*_distribution(weights[name]), where="post", label=name)
        if objective is not None:
            axes.axvline(objective, linestyle="--", color="grey", label="SLO")
        axes.set(title=title, xlabel="seconds", ylabel="share of tokens" if objective is None else "share of requests")
        axes.set_xscale("log")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, format="png")


def _distribution(weights: Mapping[float, int]) -> tuple[list[float], list[float]]:
    """The values in order, and the share that is not above each."""
    ordered = sorted(weights)
    total = sum(weights.values())
    return ordered, [count / total for count in accumulate(weights[value] for value in ordered)]


def _spread(values: list[float]) -> Spread:
    known = [value for value in values if not math.isnan(value)]
    return Spread(fmean(known) if known else math.nan, *quantiles(known, _SHARES))


def _weighted_spread(weights: Mapping[float, int]) -> Spread:
    total = sum(weights.values())
    mean = sum(value * count for value, count in weights.items()) / total if total else math.nan
    return Spread(mean, *weighted_quantiles(weights, _SHARES))


def _milliseconds(seconds: float) -> str:
    return "-" if math.isnan(seconds) else f"{1000 * seconds:.1f} ms"


def _without_nans(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nans(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_without_nans(each) for each in value]
    return None if isinstance(value, float) and math.isnan(value) else value
