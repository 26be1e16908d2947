"""The report: medians over the repeats of a run, as tables for the terminal and as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from shared.policy.shape import Shape
from tests.benchmarks.load import OFF, ON, LoadResult, Mode
from tests.benchmarks.machine import Machine
from tests.benchmarks.measurement import PROMPT_TOKENS, PairResult, Plan
from tests.benchmarks.memory import Memory
from tests.benchmarks.prefix import PREFIX_TOKENS


@dataclass(frozen=True, slots=True)
class Row:
    """The service at one number of streams. Each number is a median over repeats, ratios taken within a repeat.

    `off` and `on`: output tokens a second without and with speculation; `off_multiple` and
    `on_multiple`: the same over plain `generate` at one stream. `worst_on_over_off` is the least of the
    repeats. `fixed`: tokens a second by fixed shape, draft tokens or steps/tokens of a tree, `best_fixed` the fastest
    of them, and `tree_over_chain` the best tree's over the best chain's; empty and None where these were not measured.
    `mean_gamma`: draft tokens a round that drafted; `acceptance_rate`:
    α; both None if nothing was ever drafted. `drafted_share`: the part of the output that the draft
    proposed. Times to first token are medians over loads, each of which counts as the median of its streams; but
    `ttft_ratio` is, as every ratio, the median of those of each repeat.
    """

    streams: int
    off: float
    on: float
    on_over_off: float
    worst_on_over_off: float
    fixed: dict[str, float]
    best_fixed: str | None
    on_over_best_fixed: float | None
    tree_over_chain: float | None
    off_multiple: float
    on_multiple: float
    mean_gamma: float | None
    acceptance_rate: float | None
    drafted_share: float
    off_ttft_seconds: float
    on_ttft_seconds: float
    ttft_ratio: float


@dataclass(frozen=True, slots=True)
class PrefixRow:
    """Medians over the prefixes, but for the tokens: of the prefix that found the fewest."""

    cold_ttft_seconds: float
    warm_ttft_seconds: float
    speedup: float
    cached_tokens: int
    cacheable_tokens: int


@dataclass(frozen=True, slots=True)
class Summary:
    """A pair in numbers; `plain` and `assisted` are transformers' output tokens a second at one stream.

    `plain_range` is the slowest and the fastest `plain` of the repeats: far apart, the machine was busy
    with something else, and the multiples are worth little.
    """

    name: str
    plain: float
    assisted: float
    plain_range: tuple[float, float]
    rows: tuple[Row, ...]
    prefix: PrefixRow
    memory: dict[str, Memory]


def summarize(result: PairResult, streams: Sequence[int]) -> Summary:
    """Medians of all that was measured on a pair."""
    plain = [repeat.baseline.plain for repeat in result.repeats]
    return Summary(
        name=result.name,
        plain=median(plain),
        assisted=median(repeat.baseline.assisted for repeat in result.repeats),
        plain_range=(min(plain), max(plain)),
        rows=tuple(_row(result, count) for count in streams),
        prefix=PrefixRow(
            cold_ttft_seconds=median(prefix.cold_ttft_seconds for prefix in result.prefixes),
            warm_ttft_seconds=median(prefix.warm_ttft_seconds for prefix in result.prefixes),
            speedup=median(prefix.speedup for prefix in result.prefixes),
            cached_tokens=min(prefix.cached_tokens for prefix in result.prefixes),
            cacheable_tokens=min(prefix.cacheable_tokens for prefix in result.prefixes),
        ),
        memory=result.memory,
    )


def render(summary: Summary) -> Group:
    """The tables of a pair."""
    return Group(_speeds(summary), Text(), _workings(summary), _captions(summary), Text())


def legend(plan: Plan, machine: Machine) -> Text:
    """What is needed to read the tables."""
    lengths = f"{PROMPT_TOKENS} prompt and {plan.num_tokens} output tokens a stream, bf16, greedy; TTFT in ms"
    lengths += "; the draft model inside the target worker" if plan.inside else ""
    return Text(f"{lengths}; medians of {plan.repeats}, ratios taken within each repeat.\n{machine}", "dim")


def to_json(
    results: Sequence[PairResult], summaries: Sequence[Summary], plan: Plan, machine: Machine
) -> dict[str, Any]:
    """The summaries, and every number they were taken from."""
    return {
        "machine": asdict(machine),
        "plan": {"prompt_tokens": PROMPT_TOKENS, **asdict(plan)},
        "summaries": [asdict(summary) for summary in summaries],
        "results": [asdict(result) for result in results],
    }


def _row(result: PairResult, streams: int) -> Row:
    plain = [repeat.baseline.plain for repeat in result.repeats]
    off = [repeat.cell(streams, OFF) for repeat in result.repeats]
    on = [repeat.cell(streams, ON) for repeat in result.repeats]
    off_speed = [_tokens_per_second(loads) for loads in off]
    on_speed = [_tokens_per_second(loads) for loads in on]
    fixed_speeds = _fixed_speeds(result, streams)
    best = _best(fixed_speeds)
    chain, tree = (_best({s: v for s, v in fixed_speeds.items() if s.is_tree == trees}) for trees in (False, True))
    tree_over_chain = None
    if chain is not None and tree is not None:
        tree_over_chain = median(_ratios(fixed_speeds[tree], fixed_speeds[chain]))
    all_on = [load for loads in on for load in loads]
    return Row(
        streams=streams,
        off=median(off_speed),
        on=median(on_speed),
        on_over_off=median(_ratios(on_speed, off_speed)),
        worst_on_over_off=min(_ratios(on_speed, off_speed)),
        fixed={_label(shape): median(speeds) for shape, speeds in fixed_speeds.items()},
        best_fixed=None if best is None else _label(best),
        on_over_best_fixed=None if best is None else median(_ratios(on_speed, fixed_speeds[best])),
        tree_over_chain=tree_over_chain,
        off_multiple=median(_ratios(off_speed, plain)),
        on_multiple=median(_ratios(on_speed, plain)),
        mean_gamma=_median_known([load.draft_tokens / load.rounds if load.rounds else None for load in all_on]),
        acceptance_rate=_median_known([load.acceptance_rate for load in all_on]),
        drafted_share=median(load.accepted_tokens / load.output_tokens for load in all_on),
        off_ttft_seconds=_median_ttft(load for loads in off for load in loads),
        on_ttft_seconds=_median_ttft(load for loads in on for load in loads),
        ttft_ratio=median(_ratios([_median_ttft(loads) for loads in on], [_median_ttft(loads) for loads in off])),
    )


def _fixed_speeds(result: PairResult, streams: int) -> dict[Shape, list[float]]:
    """By fixed shape, chains first and the smaller ones, the tokens a second of each repeat."""
    loads = [load for repeat in result.repeats for load in repeat.loads if load.streams == streams]
    shapes = {load.fixed for load in loads if load.fixed is not None}
    return {
        shape: [_tokens_per_second(repeat.cell(streams, Mode(True, shape))) for repeat in result.repeats]
        for shape in sorted(shapes, key=lambda shape: (shape.is_tree, shape))
    }


def _best(speeds: dict[Shape, list[float]]) -> Shape | None:
    """The fastest in the median; None of none."""
    return max(speeds, key=lambda shape: median(speeds[shape]), default=None)


def _label(shape: Shape) -> str:
    return f"{shape.num_draft_tokens}/{shape.num_nodes}" if shape.is_tree else str(shape.num_draft_tokens)


def _tokens_per_second(loads: Sequence[LoadResult]) -> float:
    """Of loads that ran one after another."""
    return sum(load.output_tokens for load in loads) / sum(load.seconds for load in loads)


def _ratios(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    """Repeat by repeat. Medians are taken of these, not before: both sides of a ratio met the same disturbance."""
    return [numerator / denominator for numerator, denominator in zip(numerators, denominators, strict=True)]


def _median_known(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _median_ttft(loads: Iterable[LoadResult]) -> float:
    """Over loads, of each the median of its streams.

    Not of all streams together: those of a burst get their first tokens by the step, four at a time, and among those of
    several loads the middle is the end of one step or of the next, as it happens.
    """
    return median(median(load.ttft_seconds) for load in loads)


def _speeds(summary: Summary) -> Table:
    speeds = ("off\ntok/s", "on\ntok/s", "on /\noff", "worst\nrepeat", "best\nfixed", "on /\nbest")
    table = _table(("streams", *speeds, "off ×\nplain", "on ×\nplain"), title=f"{summary.name} pair")
    for row in summary.rows:
        table.add_row(
            str(row.streams),
            f"{row.off:.1f}",
            f"{row.on:.1f}",
            f"{row.on_over_off:.2f}",
            f"{row.worst_on_over_off:.2f}",
            _if_known(row.best_fixed, "s"),
            _if_known(row.on_over_best_fixed, ".2f"),
            f"{row.off_multiple:.2f}",
            f"{row.on_multiple:.2f}",
        )
    return table


def _workings(summary: Summary) -> Table:
    """Times to first token, and what speculation did."""
    table = _table(("streams", "TTFT\noff", "TTFT\non", "on /\noff", "mean\nγ", "α", "draft\nshare"))
    for row in summary.rows:
        table.add_row(
            str(row.streams),
            f"{row.off_ttft_seconds * 1000:.0f}",
            f"{row.on_ttft_seconds * 1000:.0f}",
            f"{row.ttft_ratio:.2f}",
            _if_known(row.mean_gamma, ".1f"),
            _if_known(row.acceptance_rate, ".2f"),
            f"{row.drafted_share:.0%}",
        )
    return table


def _table(headings: Sequence[str], title: str | None = None) -> Table:
    table = Table(
        title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0)
    )
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _if_known(value: float | str | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _captions(summary: Summary) -> Text:
    assisted = f"assisted {summary.assisted:.1f} tok/s ({summary.assisted / summary.plain:.2f} × plain)"
    prefix = summary.prefix
    slowest, fastest = summary.plain_range
    plain = f"plain {summary.plain:.1f} tok/s ({slowest:.1f} to {fastest:.1f})"
    fixed = ""
    for row in summary.rows:
        if row.fixed:
            speeds = ", ".join(f"{label}: {speed:.1f}" for label, speed in row.fixed.items())
            fixed = f"fixed draft tokens, and steps/tokens of trees, tok/s: {speeds}\n"
            if row.tree_over_chain is not None:
                fixed += f"best tree over best chain: {row.tree_over_chain:.2f}\n"
    memory = "".join(
        f"\n{name}: {used.resident:,.0f} MiB resident; weights {used.weights:,.0f}, KV cache up to {used.kv_cache:,.0f}"
        for name, used in summary.memory.items()
    )
    return Text(
        f"{fixed}transformers generate at 1 stream: {plain}, {assisted}\n"
        f"prefix of {PREFIX_TOKENS} tokens: TTFT {_milliseconds(prefix.cold_ttft_seconds)} cold, "
        f"{_milliseconds(prefix.warm_ttft_seconds)} repeated ({prefix.speedup:.1f} × faster); "
        f"cached {prefix.cached_tokens} of the {prefix.cacheable_tokens} tokens in its full blocks{memory}"
    )


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms"
