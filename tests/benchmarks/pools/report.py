"""The report of `make bench-pools`: tables for the terminal, and JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import median, pstdev
from typing import Any, Final

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from shared.policy.step_costs import StepCosts
from tests.benchmarks.machine import Machine
from tests.benchmarks.pools import bursts, goodput, interference, prefixes, routing
from tests.benchmarks.pools.results import Part, Results, Rows, comparisons_of, rows_of
from tests.benchmarks.pools.run import Run
from tests.benchmarks.pools.simulation import Comparison, at_warm_up, steps_of
from tests.benchmarks.pools.transfer import COPY, RAW, Rate, transfer_costs

LEAST_OF_RAW: Final = 0.8
"""Share of what nixl moves by itself that our engine should, and a fetch with it."""
MOST_ERROR: Final = 0.15
"""How far a simulated number should be off the measured one at most."""

# Of steps whose costs are shown.
_SHOWN_SIZES = (1, 8, 64, 512)

PARTS: Final = {
    "a": Part(
        f"{interference.NUM_STREAMS} streams, and a prompt of {interference.PROMPT_TOKENS} tokens every "
        f"{interference.SECONDS_BETWEEN:g} s",
        interference.numbers_of,
        interference.COMPARED,
    ),
    "d": Part(
        f"{routing.PREFIXES.count} system prompts of {routing.PREFIXES.num_tokens} tokens (Zipf), "
        f"{routing.RATE:g} requests a second over 2 workers",
        routing.numbers_of,
        routing.COMPARED,
    ),
    "e": Part(
        f"requests a second within TTFT {goodput.OBJECTIVES.ttft:g} s and TPOT {goodput.OBJECTIVES.tpot * 1000:g} ms: "
        f"{goodput.PROMPT_TOKENS.mean:g} prompt and {goodput.OUTPUT_TOKENS.mean:g} output tokens on average",
        goodput.numbers_of,
        goodput.COMPARED,
    ),
    "f": Part(
        f"{bursts.NUM_STREAMS} streams, and {bursts.NUM_REQUESTS} prompts of {bursts.PROMPT_TOKENS} tokens at once "
        f"every {bursts.SECONDS_BETWEEN:g} s",
        bursts.numbers_of,
        bursts.COMPARED,
    ),
}


def render(results: Results, machine: Machine) -> Group:
    """The tables of what was measured, with what is needed to read them."""
    parts: list[Table | Text] = []
    for letter in ("a", "b", "c", "d", "e", "f"):
        if letter in results.runs:
            parts += [_served(letter, rows_of(PARTS[letter], results.runs[letter])), Text()]
        if letter == "b" and results.rates:
            parts += [_transfers(results.rates), Text()]
        if letter == "c" and results.samples:
            parts += [_prefixes(results.samples), Text()]
    if "e" in results.runs:
        parts += [Text(_crossing(rows_of(PARTS["e"], results.runs["e"]))), Text()]
    compared = _comparisons(results)
    if compared:
        parts += [_step_costs(results), Text(), _simulated(compared), Text()]
    parts.append(
        Text(
            f"bf16, greedy, speculation off; over the repeats together, transfers and prefixes as medians.\n{machine}",
            "dim",
        )
    )
    return Group(*parts)


def to_json(results: Results, machine: Machine, options: Mapping[str, Any]) -> dict[str, Any]:
    """Every number above, and those they were taken from."""
    return {
        "machine": asdict(machine),
        "options": dict(options),
        "rows": {letter: rows_of(PARTS[letter], runs) for letter, runs in results.runs.items()},
        "comparisons": {letter: [asdict(each) for each in compared] for letter, compared in _comparisons(results)},
        "transfers": [asdict(rate) for rate in results.rates],
        "prefixes": [asdict(sample) for sample in results.samples],
        "runs": {letter: [[_run(run) for run in runs] for runs in repeats] for letter, repeats in results.runs.items()},
    }


def _steps(run: Run) -> dict[str, Any]:
    fitted = steps_of(run)
    return {
        "count": fitted.num_steps,
        "costs": fitted.costs.measured,
        "attention_seconds": fitted.attention_seconds,
        "context_seconds": fitted.context_seconds,
        "beside_another": fitted.beside_another._asdict(),
        "variation": {kind: pstdev(ratios) for kind, ratios in fitted.variation._asdict().items()},
    }


def _run(run: Run) -> dict[str, Any]:
    return {
        "name": run.name,
        "setup": asdict(run.setup),
        "routing": run.routing.value,
        "steps": _steps(run),
        "at_warm_up": at_warm_up(run),
        "latency_seconds": run.observed.latency_seconds,
        "requests": [
            {
                **each.request._asdict(),
                "ttft": each.token_times[0] - each.request.time,
                "ended": each.token_times[-1],
                "cached_tokens": each.cached_tokens,
            }
            for each in run.served
        ],
    }


def _comparisons(results: Results) -> list[tuple[str, list[Comparison]]]:
    if not results.runs:
        return []
    transfer = transfer_costs(results.rates)
    return [(letter, comparisons_of(PARTS[letter], repeats, transfer)) for letter, repeats in results.runs.items()]


def _served(letter: str, rows: Rows) -> Table:
    columns = list(next(iter(rows.values())))
    table = _table(f"{letter}: {PARTS[letter].title}", "", *columns)
    for name, numbers in rows.items():
        table.add_row(name, *(_show(column, numbers[column]) for column in columns))
    return table


def _show(name: str, value: float) -> str:
    if name.startswith(("gap", "TTFT", "TPOT")):
        return f"{1000 * value:.0f} ms"
    if name in ("prefix hit", "within SLOs"):
        return f"{value:.0%}"
    return f"{value:.2f}"


def _transfers(rates: Sequence[Rate]) -> Table:
    table = _table("b: KV from process to process", "blocks", "MiB", "", "GiB/s", "of a copy", "of nixl alone", "")
    speeds: dict[tuple[int, str], float] = {}
    num_bytes: dict[int, int] = {}
    for rate in rates:
        several = [each.bytes_per_second for each in rates if (each.num_blocks, each.method) == _key(rate)]
        speeds[_key(rate)] = median(several)
        num_bytes[rate.num_blocks] = rate.num_bytes
    for (count, method), speed in speeds.items():
        raw = speeds.get((count, RAW))
        held = ""
        if raw is not None and method == "nixl engine":
            held = _verdict(speed >= LEAST_OF_RAW * raw, f"at least {LEAST_OF_RAW:.0%}")
        table.add_row(
            str(count),
            f"{num_bytes[count] / 2**20:.0f}",
            method,
            f"{speed / 2**30:.2f}",
            f"{speed / speeds[count, COPY]:.0%}",
            "-" if raw is None else f"{speed / raw:.0%}",
            held,
        )
    return table


def _key(rate: Rate) -> tuple[int, str]:
    return rate.num_blocks, rate.method


def _prefixes(samples: Sequence[prefixes.Sample]) -> Table:
    title = f"c: first token of {prefixes.PROMPT_TOKENS} tokens, with the prefix"
    table = _table(title, "", "TTFT", "sooner", "cached", "came by", "MiB", "")
    for row in prefixes.rows_of(samples):
        bar = prefixes.BARS.get(row.where)
        table.add_row(
            row.where,
            f"{1000 * row.ttft_seconds:.0f} ms",
            f"{row.speedup:.1f} ×",
            str(row.cached_tokens),
            row.transfer_engine or "-",
            f"{row.transfer_bytes / 2**20:.0f}",
            "" if bar is None else _verdict(row.speedup >= bar, f"at least {bar:g} ×"),
        )
    return table


def _crossing(rows: Rows) -> str:
    one, other = ([rows[goodput.name_of(setup, rate)]["goodput"] for rate in goodput.RATES] for setup in goodput.SETUPS)
    return f"e: {goodput.verdict(goodput.RATES, one, other)}"


def _step_costs(results: Results) -> Table:
    """What steps cost in the first repeat of each run, and what the workers had measured at warm-up."""
    headings = [f"{size} tokens" for size in _SHOWN_SIZES]
    title = "steps, in milliseconds (at warm-up)"
    table = _table(title, "", "", "steps", *headings, "1,000 of context", "beside another", "±")
    for letter, repeats in results.runs.items():
        for run in repeats[0]:
            fitted, warm_up = steps_of(run), StepCosts(at_warm_up(run))
            costs = ((fitted.costs.seconds(size), warm_up.seconds(size)) for size in _SHOWN_SIZES)
            variation = pstdev(ratio for ratios in fitted.variation for ratio in ratios)
            table.add_row(
                letter,
                run.name,
                str(fitted.num_steps),
                *(f"{1000 * seconds:.0f} ({1000 * before:.0f})" for seconds, before in costs),
                f"{1e6 * fitted.context_seconds:.1f}",
                " / ".join(f"{factor:.2f}" for factor in fitted.beside_another),
                f"{variation:.0%}",
            )
    return table


def _simulated(compared: Sequence[tuple[str, Sequence[Comparison]]]) -> Table:
    title = f"simulated / measured; should be within {MOST_ERROR:.0%}"
    table = _table(title, "", "", "", "measured", "simulated", "ratio", "from warm-up", "")
    for letter, each in ((letter, each) for letter, several in compared for each in several):
        table.add_row(
            letter,
            each.run,
            each.what,
            _show(each.what, each.live),
            _show(each.what, each.simulated),
            f"{each.ratio:.2f}",
            f"{each.ratio_from_warm_up:.2f}",
            "" if abs(each.ratio - 1) <= MOST_ERROR else "off",
        )
    return table


def _verdict(held: bool, bar: str) -> str:
    return bar if held else f"not {bar}"


def _table(title: str, *headings: str) -> Table:
    table = Table(
        title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0)
    )
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table
