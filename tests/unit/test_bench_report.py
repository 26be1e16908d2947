"""The benchmark's arithmetic: medians over repeats, ratios within them, totals over streams."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence

import numpy as np
import pytest
from rich.console import Console

from shared.policy.shape import Shape
from tests.benchmarks.baseline import Baseline
from tests.benchmarks.load import LoadResult, Mode
from tests.benchmarks.machine import Machine
from tests.benchmarks.measurement import (
    FIXED_SHAPES,
    PairResult,
    Plan,
    Repeat,
    error_of_ratio,
    is_known,
    num_turns,
    order_of_loads,
    which_prompts,
)
from tests.benchmarks.memory import Memory
from tests.benchmarks.prefix import PrefixResult
from tests.benchmarks.report import legend, render, summarize, to_json

MACHINE = Machine("Abacus", "beads", cores=2, python="3.12.0", torch="2.13.0", transformers="5.23.0", load_average=0.1)


def load(
    seconds: float,
    *,
    speculation: bool,
    shape: Shape | None = None,
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
        fixed=shape,
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
        {"target-0": Memory(1900.0, 548.1, 4096.0)},
    )


def cell(off: float, on: float) -> list[LoadResult]:
    """One stream with speculation off and on, of so many seconds."""
    return [load(off, speculation=False), load(on, speculation=True)]


def fixed(gamma: int, seconds: float, num_nodes: int = 0) -> LoadResult:
    shape = Shape(gamma, num_nodes)
    return load(seconds, speculation=True, shape=shape, drafted=9 * max(shape), accepted=9, rounds=9, alpha=0.1)


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
    assert row.worst_on_over_off == pytest.approx(0.5)
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


def test_on_is_held_against_the_fixed_gamma_that_is_fastest_in_the_median() -> None:
    # Output is 100 tokens. γ = 1 is fastest in the first repeat alone, γ = 2 in the median: 25, 50 and 20
    # tokens a second against 100, 20 and 10. On is 50, 40 and 10: over γ = 2 that is 2, 0.8 and 0.5.
    measured = result(
        [
            (1.0, [*cell(off=4.0, on=2.0), fixed(1, 1.0), fixed(2, 4.0)]),
            (1.0, [*cell(off=4.0, on=2.5), fixed(1, 5.0), fixed(2, 2.0)]),
            (1.0, [*cell(off=4.0, on=10.0), fixed(1, 10.0), fixed(2, 5.0)]),
        ]
    )
    (row,) = summarize(measured, [1]).rows
    assert row.fixed == pytest.approx({"1": 20.0, "2": 25.0})
    assert row.best_fixed == "2"
    assert row.tree_over_chain is None
    assert row.on_over_best_fixed == pytest.approx(0.8)
    assert (row.off, row.on, row.on_over_off) == pytest.approx((25.0, 40.0, 1.6))  # no fixed γ among them


def test_the_best_tree_is_held_against_the_best_chain() -> None:
    # 50 and 100 tokens a second by chains, 200 and 120 by the tree that is best in the median, of 160.
    repeats = [
        (1.0, [*cell(1.0, 1.0), fixed(1, 2.0), fixed(2, chain), fixed(2, tree, 8), fixed(3, 2.0, 11)])
        for chain, tree in ((1.0, 0.5), (2.0, 1 / 1.2), (1.0, 0.625))
    ]
    (row,) = summarize(result(repeats), [1]).rows
    assert row.fixed == pytest.approx({"1": 50.0, "2": 100.0, "2/8": 160.0, "3/11": 50.0})
    assert row.best_fixed == "2/8"
    assert row.tree_over_chain == pytest.approx(2.0)  # of 2, 2.4 and 1.6


def test_without_fixed_gammas_there_is_none_to_be_held_against() -> None:
    loads = [*cell(off=1.0, on=1.0), fixed(1, 1.0)]
    loads += [load(1.0, speculation=on, streams=8) for on in (False, True)]
    alone, many = summarize(result([(1.0, loads)]), [1, 8]).rows
    assert (alone.best_fixed, alone.on_over_best_fixed) == ("1", 1.0)
    assert (many.fixed, many.best_fixed, many.on_over_best_fixed) == ({}, None, None)


def test_what_speculation_did() -> None:
    on = load(1.0, speculation=True, output=100, drafted=120, accepted=60, rounds=30, alpha=0.75)
    (row,) = summarize(result([(1.0, [load(1.0, speculation=False), on])]), [1]).rows
    assert (row.mean_gamma, row.acceptance_rate, row.drafted_share) == (4.0, 0.75, 0.6)


def test_without_a_draft_there_is_no_acceptance_rate() -> None:
    (row,) = summarize(result([(1.0, [load(1.0, speculation=on) for on in (False, True)])]), [1]).rows
    assert (row.mean_gamma, row.acceptance_rate, row.drafted_share) == (None, None, 0.0)


def test_ttft_of_bursts_does_not_depend_on_how_they_are_put_together() -> None:
    """Of each burst half the streams are in the second step and half in the third: the middle is between them."""
    bursts = [[1.0, 2.0 + late, 3.0 + late, 4.0] for late in (0.0, 0.01, 0.02)]
    loads = [load(1.0, speculation=speculation, ttft=ttft) for speculation in (False, True) for ttft in bursts]
    loads.append(load(1.0, speculation=True, ttft=[1.0, 2.9, 3.9, 4.0]))
    (row,) = summarize(result([(1.0, loads)]), [1]).rows
    assert row.off_ttft_seconds == pytest.approx(2.51)
    assert row.on_ttft_seconds == pytest.approx(2.515), "one that came late moves it little"


def test_ttft_is_the_median_over_all_loads() -> None:
    repeats = [
        (1.0, [load(1.0, speculation=False, ttft=[0.1, 0.9]), load(1.0, speculation=True, ttft=[0.2, 0.3])]),
        (1.0, [load(1.0, speculation=False, ttft=[0.4, 0.5]), load(1.0, speculation=True, ttft=[0.4, 9.0])]),
    ]
    (row,) = summarize(result(repeats), [1]).rows
    assert [row.off_ttft_seconds, row.on_ttft_seconds] == pytest.approx([0.475, 2.475])


def test_the_ratio_of_ttfts_is_the_median_of_each_repeats_own() -> None:
    # Off has medians 0.5, 1 and 4; on has 1, 0.5 and 6: ratios of 2, 0.5 and 1.5, where all medians are 1 and 1.
    repeats = [
        (1.0, [load(1.0, speculation=False, ttft=[0.2, 0.5, 0.9]), load(1.0, speculation=True, ttft=[1.0, 1.0, 7.0])]),
        (1.0, [load(1.0, speculation=False, ttft=[1.0, 1.0, 1.0]), load(1.0, speculation=True, ttft=[0.1, 0.5, 0.6])]),
        (1.0, [load(1.0, speculation=False, ttft=[4.0, 4.0, 4.0]), load(1.0, speculation=True, ttft=[0.2, 6.0, 6.0])]),
    ]
    (row,) = summarize(result(repeats), [1]).rows
    assert [row.off_ttft_seconds, row.on_ttft_seconds, row.ttft_ratio] == pytest.approx([1.0, 1.0, 1.5])


def test_prefixes_have_median_times_and_the_least_of_cached_tokens() -> None:
    loads = [load(1.0, speculation=on) for on in (False, True)]
    prefixes = [PrefixResult(1.0, 0.1, 992, 992), PrefixResult(2.0, 0.1, 976, 992), PrefixResult(3.0, 0.6, 992, 992)]
    prefix = summarize(result([(1.0, loads)], prefixes), [1]).prefix
    assert (prefix.cold_ttft_seconds, prefix.warm_ttft_seconds) == (2.0, 0.1)
    assert prefix.speedup == pytest.approx(10.0)  # of 10, 20 and 5
    assert (prefix.cached_tokens, prefix.cacheable_tokens) == (976, 992)


@pytest.mark.parametrize("with_fixed", [True, False])
@pytest.mark.parametrize("turn", [0, 1, 2])
def test_over_two_turns_every_mode_has_the_same_mean_position(with_fixed: bool, turn: int) -> None:
    order = [*order_of_loads(turn, with_fixed), *order_of_loads(turn + 1, with_fixed)]
    positions = {mode: [i for i, each in enumerate(order) if each == mode] for mode in order}
    fixed = FIXED_SHAPES if with_fixed else ()
    off, on = Mode(speculation=False), Mode(speculation=True)
    assert positions.keys() == {off, on, *(Mode(speculation=True, fixed=shape) for shape in fixed)}
    assert len({sum(at) / len(at) for at in positions.values()}) == 1
    assert len(positions[off]) == len(positions[on])


@pytest.mark.parametrize("turn", [0, 1])
def test_fixed_shapes_have_the_same_prompts_and_no_tenant_one_twice(turn: int) -> None:
    modes = order_of_loads(turn, with_fixed=True)
    fixed = {which for mode, which in zip(modes, which_prompts(modes), strict=True) if mode.fixed is not None}
    others = [which for mode, which in zip(modes, which_prompts(modes), strict=True) if mode.fixed is None]
    assert len(fixed) == 1
    assert sorted(others) == list(range(len(others)))
    assert fixed < set(others)


@pytest.mark.parametrize(("seconds", "num", "with_fixed"), [(20.0, 4, 8), (7.9, 8, 8), (1.0, 48, 12), (0.1, 64, 64)])
def test_short_loads_are_run_in_more_turns_and_always_in_pairs(seconds: float, num: int, with_fixed: int) -> None:
    assert num_turns(seconds, with_fixed=False) == num
    assert num_turns(seconds, with_fixed=True) == with_fixed


def turns(*seconds: tuple[float, float]) -> list[list[LoadResult]]:
    """Each with one load without speculation and one with it."""
    return [[load(off, speculation=False), load(on, speculation=True)] for off, on in seconds]


def test_the_error_of_a_ratio_is_how_its_turns_scatter() -> None:
    # 3,000 ratios of 40 turns each, whose loads share the machine's speed and stray by 10 and 5 percent of their own:
    # the error said is how far these ratios are apart.
    rng = np.random.default_rng(0)
    machine = rng.lognormal(0.0, 0.3, (3000, 40))
    off, on = (machine * rng.lognormal(0.0, spread, machine.shape) for spread in (0.1, 0.05))
    apart = float(np.std(off.sum(1) / on.sum(1)))
    said = [error_of_ratio(turns(*zip(map(float, off[i]), map(float, on[i]), strict=True))) for i in range(100)]
    assert sum(said) / len(said) == pytest.approx(apart, rel=0.1)
    # That the machine as a whole was slower in some turns says nothing against the ratio.
    assert error_of_ratio(turns((1.0, 1.1), (10.0, 11.0), (3.0, 3.3))) == pytest.approx(0.0)


def test_a_repeat_goes_on_while_its_turns_scatter_but_not_for_ever() -> None:
    steady = [(12.0, 12.0), (12.0, 12.1)]
    assert [is_known(turns(*steady * n), with_fixed=False) for n in (0, 1, 2)] == [False, False, True]
    assert not is_known(turns(*steady * 3)[:5], with_fixed=False)
    scattered = [(12.0, 8.0), (12.0, 16.0)]
    assert [is_known(turns(*scattered * n), with_fixed=False) for n in (2, 3, 4)] == [False, False, True]
    assert [is_known(turns(*scattered * n), with_fixed=True) for n in (2, 4)] == [False, True]


def test_the_tables_fit_a_terminal_and_the_json_has_every_number() -> None:
    measured = result(
        [
            (
                256.0,
                [
                    load(1.0, speculation=False, output=1000, ttft=[12.345]),
                    load(2.0, speculation=True, output=1000, ttft=[10.0]),
                    *[fixed(gamma, 0.1 / gamma) for gamma in range(1, 9)],
                    fixed(3, 0.01, 11),
                    load(1.0, speculation=False, streams=32, output=4096),
                    load(2.0, speculation=True, streams=32, output=4096, drafted=9, accepted=6, rounds=3, alpha=0.9),
                ],
            )
        ]
    )
    plan = Plan(streams=(1, 32), repeats=1, num_tokens=128)
    summaries = [summarize(measured, plan.streams)]

    screen = io.StringIO()
    Console(file=screen, width=80).print(render(summaries[0]), legend(plan, MACHINE))
    lines = screen.getvalue().splitlines()
    assert [line.split() for line in lines if line.split()[:1] in (["1"], ["32"])] == [
        ["1", "1000.0", "500.0", "0.50", "0.50", "3/11", "0.05", "3.91", "1.95"],
        ["32", "4096.0", "2048.0", "0.50", "0.50", "-", "-", "16.00", "8.00"],
        ["1", "12345", "10000", "0.81", "-", "-", "0%"],
        ["32", "500", "500", "1.00", "3.0", "0.90", "0%"],
    ]
    assert [line.split() for line in lines if line.startswith("streams")] == [
        ["streams", "tok/s", "tok/s", "off", "repeat", "fixed", "best", "plain", "plain"],
        ["streams", "off", "on", "off", "γ", "α", "share"],
    ]
    assert not [line for line in lines if len(line) > 80 or "…" in line]
    assert "trees, tok/s: 1: 1000.0, 2: 2000.0, 3:" in screen.getvalue()
    assert "best tree over best chain: 1.25" in screen.getvalue()
    assert "target-0: 1,900 MiB resident; weights 548, KV cache up to 4,096" in screen.getvalue()
    assert "Abacus (beads), 2 cores" in screen.getvalue()

    written = json.loads(json.dumps(to_json([measured], summaries, plan, MACHINE)))
    row = written["summaries"][0]["rows"][0]
    assert (row["on_over_off"], row["best_fixed"], row["on_over_best_fixed"]) == (0.5, "3/11", 0.05)
    assert row["fixed"].keys() == {*(str(gamma) for gamma in range(1, 9)), "3/11"}
    loads = written["results"][0]["repeats"][0]["loads"]
    assert [each["seconds"] for each in loads[:2]] == [1.0, 2.0]
    fixed_shapes = [*([gamma, 0] for gamma in range(1, 9)), [3, 11]]
    assert [each["fixed"] for each in loads] == [None, None, *fixed_shapes, None, None]
    lengths = {"prompt_tokens": 128, "num_tokens": 128}
    assert written["plan"] == {**lengths, "streams": [1, 32], "repeats": 1, "inside": False}
