"""The benchmark's arithmetic: medians over repeats, ratios within them, totals over streams."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence

import pytest
from rich.console import Console

from tests.benchmarks.baseline import Baseline
from tests.benchmarks.load import LoadResult
from tests.benchmarks.machine import Machine
from tests.benchmarks.measurement import PairResult, Plan, Repeat
from tests.benchmarks.prefix import PrefixResult
from tests.benchmarks.report import render, summarize, to_json

MACHINE = Machine(cpu="Abacus", cores=2, python="3.12.0", torch="2.13.0", transformers="5.23.0", load_average=0.1)


def load(
    seconds: float,
    *,
    speculation: bool,
    streams: int = 1,
    output: int = 100,
    drafted: int = 0,
    accepted: int = 0,
    rounds: int = 0,
    alpha: float | None = None,
    ttft: Sequence[float] = (0.5,),
) -> LoadResult:
    return LoadResult(
        streams=streams,
        speculation=speculation,
        seconds=seconds,
        ttft_seconds=tuple(ttft),
        output_tokens=output,
        cached_tokens=0,
        draft_tokens=drafted,
        accepted_tokens=accepted,
        rounds=rounds,
        acceptance_rate=alpha,
    )


def result(repeats: Sequence[tuple[float, Sequence[LoadResult]]], prefixes: Sequence[PrefixResult] = ()) -> PairResult:
    """`repeats`: the plain baseline in tokens a second, and the loads."""
    return PairResult(
        "test",
        tuple(Repeat(Baseline(plain=plain, assisted=2 * plain), tuple(loads)) for plain, loads in repeats),
        tuple(prefixes) or (PrefixResult(1.0, 0.1, 992, 992),),
    )


def test_ratios_are_taken_within_a_repeat_and_then_their_median() -> None:
    # On over off: 2, 3 and 0.5, though the median speeds are 50 and 50.
    measured = result(
        [
            (10.0, [load(4.0, speculation=False), load(2.0, speculation=True)]),
            (25.0, [load(1.0, speculation=False), load(1 / 3, speculation=True)]),
            (20.0, [load(2.0, speculation=False), load(4.0, speculation=True)]),
        ]
    )
    summary = summarize(measured, [1])
    (row,) = summary.rows
    assert [row.off, row.on] == pytest.approx([50.0, 50.0])
    assert row.on_over_off == pytest.approx(2.0)
    # Off is 25, 100 and 50 tokens a second over 10, 25 and 20; on is 50, 300 and 25 over the same.
    assert row.off_multiple == pytest.approx(2.5)
    assert row.on_multiple == pytest.approx(5.0)
    assert (summary.plain, summary.assisted, summary.plain_range) == (20.0, 40.0, (10.0, 25.0))


def test_loads_of_one_cell_in_one_repeat_count_by_their_tokens_and_seconds() -> None:
    loads = [load(1.0, speculation=on, output=output) for on, output in [(False, 30), (True, 60)]]
    loads += [load(4.0, speculation=on, output=output) for on, output in [(False, 20), (True, 40)]]
    (row,) = summarize(result([(10.0, loads)]), [1]).rows
    assert (row.off, row.on) == (10.0, 20.0)


def test_each_number_of_streams_has_its_own_row() -> None:
    loads = [
        load(1.0, speculation=on, streams=streams, output=10 * streams) for streams in (1, 8) for on in (False, True)
    ]
    rows = summarize(result([(1.0, loads)]), [1, 8]).rows
    assert [(row.streams, row.off, row.on) for row in rows] == [(1, 10.0, 10.0), (8, 80.0, 80.0)]


def test_what_speculation_did() -> None:
    on = load(1.0, speculation=True, output=100, drafted=120, accepted=60, rounds=30, alpha=0.75)
    (row,) = summarize(result([(1.0, [load(1.0, speculation=False), on])]), [1]).rows
    assert (row.mean_gamma, row.acceptance_rate, row.drafted_share) == (4.0, 0.75, 0.6)


def test_without_a_draft_there_is_no_acceptance_rate() -> None:
    (row,) = summarize(result([(1.0, [load(1.0, speculation=on) for on in (False, True)])]), [1]).rows
    assert (row.mean_gamma, row.acceptance_rate, row.drafted_share) == (None, None, 0.0)


def test_ttft_is_the_median_over_all_streams() -> None:
    repeats = [
        (1.0, [load(1.0, speculation=False, ttft=[0.1, 0.9]), load(1.0, speculation=True, ttft=[0.2, 0.3])]),
        (1.0, [load(1.0, speculation=False, ttft=[0.4, 0.5]), load(1.0, speculation=True, ttft=[0.4, 9.0])]),
    ]
    (row,) = summarize(result(repeats), [1]).rows
    assert [row.off_ttft_seconds, row.on_ttft_seconds] == pytest.approx([0.45, 0.35])


def test_prefixes_have_median_times_and_the_least_of_cached_tokens() -> None:
    loads = [load(1.0, speculation=on) for on in (False, True)]
    prefixes = [PrefixResult(1.0, 0.1, 992, 992), PrefixResult(2.0, 0.1, 976, 992), PrefixResult(3.0, 0.6, 992, 992)]
    prefix = summarize(result([(1.0, loads)], prefixes), [1]).prefix
    assert (prefix.cold_ttft_seconds, prefix.warm_ttft_seconds) == (2.0, 0.1)
    assert prefix.speedup == pytest.approx(10.0)  # of 10, 20 and 5
    assert (prefix.cached_tokens, prefix.cacheable_tokens) == (976, 992)


def test_the_table_fits_a_terminal_and_the_json_has_every_number() -> None:
    on = load(2.0, speculation=True, streams=32, output=4096, drafted=9, accepted=6, rounds=3, alpha=0.9)
    measured = result([(256.0, [load(1.0, speculation=False, streams=32, output=4096), on])])
    plan = Plan(streams=(32,), repeats=1, num_tokens=128)
    summaries = [summarize(measured, plan.streams)]

    screen = io.StringIO()
    Console(file=screen, width=80).print(render(summaries, plan, MACHINE))
    shown = screen.getvalue()
    (line,) = [line for line in shown.splitlines() if "4096.0" in line]
    assert line.split() == ["32", "4096.0", "2048.0", "0.50", "16.00", "8.00", "3.0", "0.90", "0%", "500", "500"]
    assert "…" not in shown
    assert "Abacus, 2 cores" in shown

    written = json.loads(json.dumps(to_json([measured], summaries, plan, MACHINE)))
    assert written["summaries"][0]["rows"][0]["on_over_off"] == 0.5
    assert [each["seconds"] for each in written["results"][0]["repeats"][0]["loads"]] == [1.0, 2.0]
    assert written["plan"] == {"prompt_tokens": 128, "streams": [32], "repeats": 1, "num_tokens": 128}
