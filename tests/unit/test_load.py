"""The load generator's arithmetic: prompts, ramps, and what is told of a load."""

from __future__ import annotations

import io
import math
import random
from itertools import pairwise

import pytest
from rich.console import Console

from services.cli.load.generator import Answer, Load
from services.cli.load.prompts import Prompts
from services.cli.load.ramp import ramped
from services.cli.load.view import plot, progress, report, summary_of
from services.simulator.report import Objectives
from services.simulator.workload import Lengths, Request, Workload

OBJECTIVES = Objectives(ttft=1.0, tpot=0.1)


def answered(time: float, first: float, *gaps: float, prompt: int = 10, cached: int = 0) -> Answer:
    answer = Answer(Request(time, prompt, 1 + len(gaps)), cached_tokens=cached)
    answer.token_times.append(first)
    for gap in gaps:
        answer.token_times.append(answer.token_times[-1] + gap)
    answer.ended_at = answer.token_times[-1]
    return answer


def failed(time: float, error: str) -> Answer:
    return Answer(Request(time, 10, 5), ended_at=time, error=error)


def text_of(load: Load) -> str:
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(report({"2/s": load}, OBJECTIVES))
    return console.export_text()


def test_prompts_of_one_prefix_begin_alike() -> None:
    prompts = Prompts(1000, 1)
    one = prompts.draw(Request(0.0, 40, 1, "a", 32))
    shorter = prompts.draw(Request(0.0, 20, 1, "a", 16))
    longer = prompts.draw(Request(0.0, 60, 1, "a", 48))
    other = prompts.draw(Request(0.0, 40, 1, "b", 32))
    assert [len(each) for each in (one, shorter, longer, other)] == [40, 20, 60, 40]
    assert one[:32] == longer[:32]
    assert shorter[:16] == one[:16]
    assert one[:32] != other[:32]
    assert one[32:] != longer[32:40]
    assert all(0 <= token < 1000 for token in one + longer)
    assert Prompts(1000, 1).draw(Request(0.0, 40, 1, "a", 32)) == one
    assert Prompts(1000, 2).draw(Request(0.0, 40, 1, "a", 32)) != one


def test_a_ramp_rises_linearly_and_loses_nobody() -> None:
    """Arrivals by t: rate t² / (2 s) on the way up, rate (t - s / 2) behind it."""
    workload = Workload(50.0, 4000, Lengths(10), Lengths(10))
    seconds = 20.0
    requests = list(ramped(workload.requests(0), seconds))
    assert len(requests) == 4000
    assert all(before.time <= after.time for before, after in pairwise(requests))
    for time in (5.0, 10.0, 20.0, 40.0):
        expected = 50.0 * (time**2 / (2 * seconds) if time < seconds else time - seconds / 2)
        count = sum(each.time <= time for each in requests)
        assert abs(count - expected) < 4 * math.sqrt(expected)
    steady = list(workload.requests(0))
    assert list(ramped(steady, 0.0)) == steady


def test_what_failed_met_no_objective() -> None:
    load = Load([answered(0.0, 0.5, 0.05), answered(1.0, 3.0, 0.05), failed(1.5, "RESOURCE_EXHAUSTED")], 3)
    load.answers.append(failed(1.6, "UNAVAILABLE"))
    summary = summary_of(load, OBJECTIVES)
    assert summary.attainment == pytest.approx(1 / 4)
    assert summary.goodput == pytest.approx(1 / 3.05)
    assert load.errors == {"RESOURCE_EXHAUSTED": 1, "UNAVAILABLE": 1}
    text = text_of(load)
    assert "failed, RESOURCE_EXHAUSTED" in text
    assert "25.0%" in text


def test_an_output_that_ended_early_counts_as_it_came() -> None:
    answer = answered(0.0, 0.5, 0.1, 0.1)
    answer.request = answer.request._replace(num_output_tokens=50)
    assert list(Load([answer], 1).outcomes().tpot) == pytest.approx([0.1])


def test_a_load_of_which_nothing_came_is_told_all_the_same() -> None:
    load = Load([failed(0.0, "UNAVAILABLE")], 1)
    assert summary_of(load, OBJECTIVES).attainment == 0.0
    assert "0.0%" in text_of(load)


def test_what_was_sent_late_is_told() -> None:
    answer = answered(0.0, 0.5)
    answer.late = 0.25
    assert "250 ms" in text_of(Load([answer], 1))


def test_progress_is_one_line() -> None:
    running = Answer(Request(0.0, 10, 5))
    line = progress(Load([answered(0.0, 0.5), running, failed(0.1, "ABORTED")], 9), 3.0).plain
    assert "3 of 9 sent · 1 in flight · TTFT p50 500 ms" in line
    assert line.endswith("1 failed")
    assert "-" in progress(Load([], 9), 0.0).plain


def test_a_picture_is_drawn(tmp_path: object) -> None:
    pytest.importorskip("matplotlib")
    from pathlib import Path

    path = Path(str(tmp_path)) / "load.png"
    rng = random.Random(0)
    loads = {
        f"{rate}/s": Load([answered(float(i), i + rng.random(), 0.05, 0.05) for i in range(20)], 20) for rate in (1, 2)
    }
    plot(path, loads, [1.0, 2.0], OBJECTIVES)
    assert path.read_bytes().startswith(b"\x89PNG")
