"""A load in the terminal: how it goes, how it went, and as a picture."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rich.table import Table
from rich.text import Text

from services.cli.load.generator import Load
from services.simulator.outcomes import quantiles
from services.simulator.report import Objectives, Summary, drawing, summarise, table

_RECENT = 200


def progress(load: Load, now: float) -> Text:
    """One line: how far it is, and how the latest were served."""
    answers = load.answers
    recent = [answer.ttft for answer in answers[-_RECENT:] if answer.ttft is not None]
    p50, p99 = quantiles(recent, (0.5, 0.99))
    num_errors = sum(load.errors.values())
    parts = [
        f"{now:5.0f} s",
        f"{len(answers)} of {load.num_requests} sent",
        f"{load.num_in_flight} in flight",
        f"TTFT p50 {_milliseconds(p50)}, p99 {_milliseconds(p99)} (latest {_RECENT})",
    ]
    if num_errors:
        parts.append(f"{num_errors} failed")
    return Text(" · ".join(parts), style="red" if num_errors else "")


def summary_of(load: Load, objectives: Objectives) -> Summary:
    """As of a simulation; a request that failed met no objective."""
    summary = summarise(load.outcomes(), objectives)
    share = summary.attainment * summary.requests / max(1, len(load.answers))
    return replace(summary, attainment=share)


def report(loads: Mapping[str, Load], objectives: Objectives) -> Table:
    """A column for each load, by its name."""
    summaries = {name: summary_of(load, objectives) for name, load in loads.items()}
    made = table(summaries, workers=False)
    made.add_row("requests", *(str(len(load.answers)) for load in loads.values()))
    statuses = sorted({status for load in loads.values() for status in load.errors})
    for status in statuses:
        made.add_row(f"failed, {status}", *(str(load.errors[status]) for load in loads.values()))
    late = [max((answer.late for answer in load.answers), default=0.0) for load in loads.values()]
    # What was sent late was not the load that was asked for.
    made.add_row("sent late by at most", *map(_milliseconds, late))
    return made


def plot(path: Path, loads: Mapping[str, Load], rates: Sequence[float], objectives: Objectives) -> None:
    """Draws how TTFT and TPOT are distributed, and goodput over the rates, as a PNG. Raises PlotUnavailable."""
    figure = drawing().Figure(figsize=(15, 4.5), layout="constrained")
    ttft_axes, tpot_axes, goodput_axes = figure.subplots(1, 3)
    outcomes = {name: load.outcomes() for name, load in loads.items()}
    for axes, title, objective, values in (
        (ttft_axes, "TTFT", objectives.ttft, {name: list(each.ttft) for name, each in outcomes.items()}),
        (tpot_axes, "TPOT", objectives.tpot, {name: list(each.tpot) for name, each in outcomes.items()}),
    ):
        for name, several in values.items():
            ordered = sorted(value for value in several if not math.isnan(value))
            shares = [(place + 1) / len(ordered) for place in range(len(ordered))]
            axes.step(ordered, shares, where="post", label=name)
        axes.axvline(objective, linestyle="--", color="grey", label="SLO")
        axes.set(title=title, xlabel="seconds", ylabel="share of requests", xscale="log")
    goodputs = [summary_of(load, objectives).goodput for load in loads.values()]
    goodput_axes.plot(rates, goodputs, marker="o", label="within both SLOs")
    goodput_axes.plot(rates, rates, linestyle="--", color="grey", label="all that came")
    goodput_axes.set(title="goodput", xlabel="requests/s", ylabel="requests/s")
    for axes in (ttft_axes, tpot_axes, goodput_axes):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, format="png")


def _milliseconds(seconds: float) -> str:
    return "-" if math.isnan(seconds) else f"{1000 * seconds:.0f} ms"
