"""What the simulator is given: workloads drawn, traces and step costs read."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev

import pytest

from services.simulator.costs import CostsError, linear_costs, read_step_costs
from services.simulator.trace import TraceError, read_trace
from services.simulator.workload import Lengths, Request, SharedPrefixes, Workload
from tests.support.simulated_cluster import written


@pytest.mark.parametrize("burstiness", [0.0, 0.5, 1.0, 3.0])
def test_arrivals_have_their_rate_and_burstiness(burstiness: float) -> None:
    requests = list(Workload(8.0, 40_000, Lengths(100), Lengths(10), burstiness).requests(0))
    times = [0.0, *(request.time for request in requests)]
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert fmean(gaps) == pytest.approx(1 / 8, rel=0.05)
    assert stdev(gaps) / fmean(gaps) == pytest.approx(burstiness, rel=0.05, abs=1e-6)
    assert times == sorted(times)


def test_lengths_have_their_mean_and_variation() -> None:
    requests = list(Workload(1.0, 40_000, Lengths(300, 0.8), Lengths(100, 0.5)).requests(0))
    for values, mean, variation in (
        ([request.num_prompt_tokens for request in requests], 300, 0.8),
        ([request.num_output_tokens for request in requests], 100, 0.5),
    ):
        assert fmean(values) == pytest.approx(mean, rel=0.03)
        assert stdev(values) / fmean(values) == pytest.approx(variation, rel=0.05)
    assert {request.num_prompt_tokens for request in Workload(1.0, 50, Lengths(7), Lengths(1)).requests(0)} == {7}


def test_prefixes_are_as_popular_as_zipf_says() -> None:
    workload = Workload(1.0, 60_000, Lengths(50), Lengths(1), prefixes=SharedPrefixes(4, 512, share=0.5, exponent=1.0))
    requests = list(workload.requests(0))
    counts = Counter(request.prefix_id for request in requests)
    assert counts[None] == pytest.approx(30_000, rel=0.03)
    total = 1 + 1 / 2 + 1 / 3 + 1 / 4
    for rank in range(1, 5):
        assert counts[f"prefix-{rank}"] == pytest.approx(30_000 / rank / total, rel=0.05)
    assert {(request.num_prompt_tokens, request.prefix_tokens) for request in requests} == {(50, 0), (562, 512)}


def test_what_is_drawn_for_one_thing_does_not_shift_the_others() -> None:
    plain = Workload(1.0, 50, Lengths(100, 1.0), Lengths(10, 1.0))
    shared = replace(plain, prefixes=SharedPrefixes(3, 64))
    for one, other in zip(plain.requests(0), shared.requests(0), strict=True):
        assert (one.time, one.num_prompt_tokens + 64) == (other.time, other.num_prompt_tokens)
        assert one.num_output_tokens == other.num_output_tokens


def test_a_trace_is_read_from_json_lines_and_from_csv(tmp_path: Path) -> None:
    expected = [Request(0.0, 30, 4), Request(1.5, 10, 20, "7", 8)]
    lines = (
        '{"time": 101.5, "prompt_tokens": 10, "output_tokens": 20, "prefix_id": 7, "prefix_tokens": 8, "user": "x"}\n'
        '\n{"time": 100, "prompt_tokens": 30, "output_tokens": 4, "model": null}\n'
    )
    assert read_trace(written(tmp_path, lines)) == expected
    rows = "time,prompt_tokens,output_tokens,prefix_id,prefix_tokens\n101.5,10,20,7,8\n100,30,4,,\n"
    assert read_trace(written(tmp_path, rows, "trace.csv")) == expected


def test_of_a_trace_with_several_models_one_is_taken(tmp_path: Path) -> None:
    rows = "time,prompt_tokens,output_tokens,model\n1,10,20,small\n2,30,4,large\n3,5,6,small\n"
    path = written(tmp_path, rows, "trace.csv")
    assert read_trace(path, "small") == [Request(0.0, 10, 20), Request(2.0, 5, 6)]
    with pytest.raises(TraceError, match="field model names several: 'large', 'small'; choose one"):
        read_trace(path)
    with pytest.raises(TraceError, match="no requests of model 'other'"):
        read_trace(path, "other")


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "line 2: not JSON: "),
        ("[1]", "line 2: not an object"),
        ('{"prompt_tokens": 1, "output_tokens": 1}', "line 2: field time is missing"),
        ('{"time": 0, "prompt_tokens": 1}', "line 2: field output_tokens is missing"),
        ('{"time": "soon", "prompt_tokens": 1, "output_tokens": 1}', "line 2: field time is 'soon': must be a number"),
        ('{"time": NaN, "prompt_tokens": 1, "output_tokens": 1}', "line 2: field time is nan: must be finite"),
        (
            '{"time": 0, "prompt_tokens": 0, "output_tokens": 1}',
            "line 2: field prompt_tokens is 0: must be a whole number from 1",
        ),
        (
            '{"time": 0, "prompt_tokens": 1.5, "output_tokens": 1}',
            "line 2: field prompt_tokens is 1.5: must be a whole number from 1",
        ),
        (
            '{"time": 0, "prompt_tokens": 1, "output_tokens": Infinity}',
            "line 2: field output_tokens is inf: must be a whole number from 1",
        ),
        (
            '{"time": 0, "prompt_tokens": true, "output_tokens": 1}',
            "line 2: field prompt_tokens is True: must be a number",
        ),
        (
            '{"time": 0, "prompt_tokens": 5, "output_tokens": 1, "prefix_id": "a", "prefix_tokens": 6}',
            "line 2: field prefix_tokens is 6: must be at most prompt_tokens, 5",
        ),
        (
            '{"time": 0, "prompt_tokens": 5, "output_tokens": 1, "prefix_id": "a"}',
            "line 2: field prefix_tokens is missing",
        ),
        (
            '{"time": 0, "prompt_tokens": 5, "output_tokens": 1, "prefix_tokens": 4}',
            "line 2: field prefix_id is missing beside prefix_tokens",
        ),
    ],
)
def test_a_malformed_line_is_named_with_its_field(tmp_path: Path, line: str, complaint: str) -> None:
    path = written(tmp_path, f'{{"time": 0, "prompt_tokens": 1, "output_tokens": 1}}\n{line}\n')
    with pytest.raises(TraceError) as raised:
        read_trace(path)
    assert str(raised.value).startswith(f"{path}, {complaint}")


def test_a_malformed_row_is_named_with_its_field(tmp_path: Path) -> None:
    path = written(tmp_path, "time,prompt_tokens,output_tokens\n0,1,1\n1,many,1\n", "trace.csv")
    with pytest.raises(TraceError, match="line 3: field prompt_tokens is 'many': must be a number"):
        read_trace(path)


def test_a_trace_that_is_not_there_or_empty(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"nowhere\.jsonl: .*No such file"):
        read_trace(tmp_path / "nowhere.jsonl")
    with pytest.raises(TraceError, match=r"trace\.jsonl: no requests"):
        read_trace(written(tmp_path, "\n"))


def test_step_costs_are_read_from_json(tmp_path: Path) -> None:
    assert read_step_costs(written(tmp_path, "[[1, 0.02], [100, 0.04]]")).seconds(100) == 0.04
    assert linear_costs(0.02, 1000, 512).seconds(300) == pytest.approx(0.32)
    for text, complaint in (
        ("{", "costs.json: "),
        ("[]", "must be a list of .tokens, seconds., with one entry at least"),
        ("[[1, 0.02], [2, -1]]", "entry 2: must be .tokens, seconds., both above 0, not .2, -1."),
        ("[[1, 0.02], 5]", "entry 2: must be"),
        ("[[2, 0.02], [1, 0.03]]", "entry 2: 1 tokens do not come after 2"),
    ):
        with pytest.raises(CostsError, match=complaint):
            read_step_costs(written(tmp_path, text, "costs.json"))


def test_hardly_any_burstiness_is_none() -> None:
    regular, hardly = (Workload(2.0, 20, Lengths(9), Lengths(9), burstiness) for burstiness in (0.0, 1e-300))
    assert list(regular.requests(1)) == list(hardly.requests(1))
