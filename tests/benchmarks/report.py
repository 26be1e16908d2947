"""The report: medians over the repeats of a run, as tables for the terminal and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from tests.benchmarks.load import LoadResult
from tests.benchmarks.machine import Machine
from tests.benchmarks.measurement import PROMPT_TOKENS, PairResult, Plan
from tests.benchmarks.prefix import PREFIX_TOKENS


@dataclass(frozen=True, slots=True)
class Row:
    """The service at one number of streams. Each number is a median over repeats, ratios taken within a repeat.

    `off` and `on`: output tokens a second without and with speculation; `off_multiple` and
    `on_multiple`: the same over plain `generate` at one stream. `mean_gamma`: draft tokens a round that
    drafted; `acceptance_rate`: α; `drafted_share`: the part of the output that the draft proposed. The
    first two are None if nothing was ever drafted.
    """

    streams: int
    off: float
    on: float
    on_over_off: float
    off_multiple: float
    on_multiple: float
    mean_gamma: float | None
    acceptance_rate: float | None
    drafted_share: float
    off_ttft_seconds: float
    on_ttft_seconds: float


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
    )


def render(summaries: Sequence[Summary], plan: Plan, machine: Machine) -> Group:
    """The tables of all pairs, with what is needed to read them."""
    parts: list[Table | Text] = []
    for summary in summaries:
        parts += [_table(summary), _captions(summary), Text()]
    lengths = f"{PROMPT_TOKENS} prompt and {plan.num_tokens} output tokens a stream, bf16, greedy; TTFT in ms"
    parts.append(Text(f"{lengths}; medians of {plan.repeats}, ratios taken within each repeat.\n{machine}", "dim"))
    return Group(*parts)


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
    off = [repeat.cell(streams, speculation=False) for repeat in result.repeats]
    on = [repeat.cell(streams, speculation=True) for repeat in result.repeats]
    off_speed = [_tokens_per_second(loads) for loads in off]
    on_speed = [_tokens_per_second(loads) for loads in on]
    all_on = [load for loads in on for load in loads]
    return Row(
        streams=streams,
        off=median(off_speed),
        on=median(on_speed),
        on_over_off=_median_ratio(on_speed, off_speed),
        off_multiple=_median_ratio(off_speed, plain),
        on_multiple=_median_ratio(on_speed, plain),
        mean_gamma=_median_known([load.draft_tokens / load.rounds if load.rounds else None for load in all_on]),
        acceptance_rate=_median_known([load.acceptance_rate for load in all_on]),
        drafted_share=median(load.accepted_tokens / load.output_tokens for load in all_on),
        off_ttft_seconds=_median_ttft(off),
        on_ttft_seconds=_median_ttft(on),
    )


def _tokens_per_second(loads: Sequence[LoadResult]) -> float:
    """Of loads that ran one after another."""
    return sum(load.output_tokens for load in loads) / sum(load.seconds for load in loads)


def _median_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """The median of the ratios, not the ratio of the medians: both sides of a ratio met the same disturbance."""
    return median(numerator / denominator for numerator, denominator in zip(numerators, denominators, strict=True))


def _median_known(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _median_ttft(repeats: Sequence[Sequence[LoadResult]]) -> float:
    """Over the streams of all repeats."""
    return median(seconds for loads in repeats for load in loads for seconds in load.ttft_seconds)


def _table(summary: Summary) -> Table:
    title = f"{summary.name} pair"
    table = Table(
        title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0)
    )
    for heading in (
        "streams",
        "off\ntok/s",
        "on\ntok/s",
        "on /\noff",
        "off ×\nplain",
        "on ×\nplain",
        "mean\nγ",
        "α",
        "draft\nshare",
        "TTFT\noff",
        "TTFT\non",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in summary.rows:
        table.add_row(
            str(row.streams),
            f"{row.off:.1f}",
            f"{row.on:.1f}",
            f"{row.on_over_off:.2f}",
            f"{row.off_multiple:.2f}",
            f"{row.on_multiple:.2f}",
            "-" if row.mean_gamma is None else f"{row.mean_gamma:.1f}",
            "-" if row.acceptance_rate is None else f"{row.acceptance_rate:.2f}",
            f"{row.drafted_share:.0%}",
            f"{row.off_ttft_seconds * 1000:.0f}",
            f"{row.on_ttft_seconds * 1000:.0f}",
        )
    return table


def _captions(summary: Summary) -> Text:
    assisted = f"assisted {summary.assisted:.1f} tok/s ({summary.assisted / summary.plain:.2f} × plain)"
    prefix = summary.prefix
    slowest, fastest = summary.plain_range
    plain = f"plain {summary.plain:.1f} tok/s ({slowest:.1f} to {fastest:.1f})"
    return Text(
        f"transformers generate at 1 stream: {plain}, {assisted}\n"
        f"prefix of {PREFIX_TOKENS} tokens: TTFT {_milliseconds(prefix.cold_ttft_seconds)} cold, "
        f"{_milliseconds(prefix.warm_ttft_seconds)} repeated ({prefix.speedup:.1f} × faster); "
        f"cached {prefix.cached_tokens} of the {prefix.cacheable_tokens} tokens in its full blocks"
    )


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms"
