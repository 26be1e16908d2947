"""The pool benchmark's arithmetic: traces, what is told of them, and how simulated numbers are put beside them."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from outrider.v1 import worker_pb2
from rich.console import Console

from services.simulator.routing import RoutingName
from services.simulator.step_log import Step
from services.simulator.workload import Request
from tests.benchmarks.errors import BenchmarkError
from tests.benchmarks.machine import Machine
from tests.benchmarks.pools import bursts, goodput, interference, routing
from tests.benchmarks.pools.observed import Observed
from tests.benchmarks.pools.prefixes import COLD, HERE, PEER, STORE, Sample, rows_of
from tests.benchmarks.pools.report import PARTS, render, to_json
from tests.benchmarks.pools.results import Results
from tests.benchmarks.pools.results import rows_of as rows_of_runs
from tests.benchmarks.pools.run import Run
from tests.benchmarks.pools.setup import APART, COLOCATED, Setup
from tests.benchmarks.pools.simulation import Comparison, compare
from tests.benchmarks.pools.trace import Served, draw_prompts, outcomes_of
from tests.benchmarks.pools.transfer import COPY, NUM_BLOCKS, RAW, Rate, TransferCosts, transfer_costs
from tests.benchmarks.prompts import random_prompts

MACHINE = Machine("Abacus", "beads", cores=2, python="3.12.0", torch="2.13.0", transformers="5.23.0", load_average=0.1)
# A step takes 20 ms, and 1 ms more for each token; a token of KV has 1,000 bytes.
COSTS = ((1, 0.021), (512, 0.532), (2048, 2.068))
INFO = worker_pb2.WorkerInfo(
    block_size=16,
    num_blocks=4000,
    block_bytes=16_000,
    step_costs=[worker_pb2.StepCost(num_tokens=tokens, seconds=2 * seconds) for tokens, seconds in COSTS],
)
TRANSFER = TransferCosts(0.002, 1e9)


def served(request: Request, first: float, *gaps: float, cached: int = 0) -> Served:
    times = [first]
    for gap in gaps:
        times.append(times[-1] + gap)
    return Served(request, tuple(times), cached)


def a_step(time: float, num_tokens: int, num_prefill_tokens: int) -> Step:
    num_streams = num_tokens - num_prefill_tokens
    return Step(time, 0.02 + 0.001 * num_tokens, num_tokens, num_prefill_tokens, num_streams + 1, 0, 0)


def observed(*steps: Step) -> Observed:
    """By a client who is next to the worker; without steps, of one that took one of every size that costs are of."""
    return Observed(INFO, (steps or tuple(a_step(10.0 * i, size, size) for i, (size, _) in enumerate(COSTS)),), 0.0)


def streams_and_prompts(setup: Setup = APART) -> Run:
    """Eight streams of a token every 0.1 s, but one of 2 s; a prompt at 1.05 s with its first token at 3 s."""
    streams = [served(Request(0.0, 64, 31), 0.5, *[0.1] * 10, 2.0, *[0.1] * 19) for _ in range(8)]
    return Run(setup.name, setup, (*streams, served(Request(1.05, 1500, 2), 3.0, 0.5)), observed())


def alone(name: str, *requests: Request, routing: RoutingName = RoutingName.POLICY) -> Run:
    """Requests that come one after another's end, served in the very time that the model's steps take."""
    runs, steps = [], []
    for request in requests:
        prompt, seconds = a_step(request.time, request.num_prompt_tokens, request.num_prompt_tokens), 0.021
        runs.append(served(request, prompt.end, *[seconds] * (request.num_output_tokens - 1)))
        steps.append(prompt)
        steps += [a_step(prompt.end + seconds * i, 1, 0) for i in range(request.num_output_tokens - 1)]
    return Run(name, COLOCATED, tuple(runs), observed(*steps), routing)


# Traces


def test_prompts_of_one_prefix_begin_alike() -> None:
    requests = [Request(0.0, 40, 1, "a", 32), Request(1.0, 48, 1, "b", 32), Request(2.0, 50, 1, "a", 32)]
    requests.append(Request(3.0, 20, 1))
    texts = draw_prompts(requests, random_prompts(1000, 0))
    assert [len(text) for text in texts] == [40, 48, 50, 20]
    assert texts[0][:32] == texts[2][:32] != texts[1][:32]
    assert texts[0][32:] != texts[2][32:40]


def test_outcomes_are_in_order_of_ends() -> None:
    slow, fast = served(Request(1.0, 100, 3), 3.0, 0.5, 0.25, cached=64), served(Request(2.0, 50, 1), 2.5)
    outcomes = outcomes_of([slow, fast])
    assert list(outcomes.order) == [1, 0]
    assert list(outcomes.ttft) == [0.5, 2.0]
    assert outcomes.tpot[1] == pytest.approx(0.375)
    assert outcomes.inter_token == {0.5: 1, 0.25: 1}
    assert (outcomes.prompt_tokens, outcomes.cached_tokens, outcomes.seconds) == (150, 64, 2.75)


def test_the_first_prompt_comes_when_all_streams_run() -> None:
    requests = interference.trace(3)
    assert [request.time for request in requests[:8]] == [0.0] * 8
    times = [request.time for request in requests[8:]]
    assert times[0] > 0
    assert [after - before for before, after in pairwise(times)] == [interference.SECONDS_BETWEEN] * 2


def test_a_trace_has_as_many_requests_at_every_rate_as_come() -> None:
    assert len(goodput.trace(0.5, 40.0, 0)) == 20
    assert len(goodput.trace(0.01, 40.0, 0)) == 2


# What is told of them


def streams_and_bursts(setup: Setup) -> Run:
    """Eight streams of a token every 0.1 s, but for one of 1.5 s; a burst of two at 5.05 s, served till 6.55 s, and one
    of one at 20.05 s, within the 0.1 s of a token."""
    streams = [served(Request(0.0, 64, 250), 0.0, *[0.1] * 50, 1.5, *[0.1] * 198) for _ in range(bursts.NUM_STREAMS)]
    first = [served(Request(5.05, 128, 2), ttft, 0.1) for ttft in (5.55, 6.55)]
    return Run(setup.name, setup, (*streams, *first, served(Request(20.05, 128, 2), 20.08, 0.1)), observed())


def test_gaps_of_streams_while_a_burst_waits_are_told_from_those_before() -> None:
    numbers = bursts.numbers_of([streams_and_bursts(bursts.SETUPS[0])])
    assert numbers["gap quiet"] == pytest.approx(0.1)
    # Of each stream one of 1.5 s and its following one, and one beside the second burst.
    assert numbers["gap p50"] == pytest.approx(0.1)
    assert numbers["gap p99"] == numbers["gap max"] == pytest.approx(1.5)
    assert (numbers["TTFT p50"], numbers["TTFT p99"]) == pytest.approx((0.5, 1.5))
    early = [served(Request(0.0, 64, 2), 0.0, 3.0)] * bursts.NUM_STREAMS + [served(Request(5.0, 128, 2), 6.0, 0.1)]
    with pytest.raises(BenchmarkError, match="0 beside one"):
        bursts.numbers_of([replace(streams_and_bursts(bursts.SETUPS[0]), served=tuple(early))])


def test_bursts_come_at_once_when_all_streams_run() -> None:
    requests = bursts.trace(2)[bursts.NUM_STREAMS :]
    times = [request.time for request in requests]
    assert times == [times[0]] * bursts.NUM_REQUESTS + [times[0] + bursts.SECONDS_BETWEEN] * bursts.NUM_REQUESTS
    assert times[0] > 2


def test_gaps_count_from_the_first_prompt_on() -> None:
    numbers = interference.numbers_of([streams_and_prompts()])
    # Of each stream five tokens came before the prompt.
    assert numbers["gap p50"] == pytest.approx(0.1)
    assert numbers["gap p99"] == pytest.approx(2.0)
    assert numbers["TTFT mean"] == pytest.approx(1.95)
    assert numbers["tokens/s"] == pytest.approx(8 * 25 / (0.5 + 1.0 + 2.0 + 1.9 - 1.05))


def test_goodput_needs_both() -> None:
    requests = [
        served(Request(0.0, 10, 3), 1.0, 0.05, 0.05),
        served(Request(0.0, 10, 3), 9.0, 0.05, 0.05),
        served(Request(0.0, 10, 3), 1.0, 0.5, 0.5),
    ]
    numbers = goodput.numbers_of([Run("x", COLOCATED, tuple(requests), observed())] * 2)
    assert numbers["within SLOs"] == pytest.approx(1 / 3)
    assert numbers["goodput"] == pytest.approx(1 / 9.1)


@pytest.mark.parametrize(
    ("colocated", "apart", "expected"),
    [
        ([1, 2, 3], [1, 1, 1], "1/s: as good; 2/s: 2 both; 3/s: 2 both. They cross nowhere here."),
        ([1, 2, 3], [2, 2.5, 2], "3/s: 2 both. They cross between 2 and 3/s."),
        # Where they are as good nobody overtakes.
        ([1, 2, 2], [2, 2.01, 1], "2/s: as good; 3/s: 2 both. They cross between 1 and 3/s."),
        ([2, 0, 1], [1, 0, 2], "3/s: 1 prefill + 1 decode. They cross between 1 and 3/s."),
    ],
)
def test_crossings_are_named(colocated: Sequence[float], apart: Sequence[float], expected: str) -> None:
    assert goodput.verdict([1, 2, 3], colocated, apart).endswith(expected)


def test_how_much_sooner_a_prefix_makes_it() -> None:
    samples = [Sample(COLD, seconds, 0, "", "", 0) for seconds in (5.0, 6.0, 7.0)]
    samples += [Sample(HERE, 0.1, 1488, "", "", 0), Sample(PEER, 0.5, 1488, "nixl", "host:1", 36)]
    samples += [Sample(STORE, 1.0, 1488, "redis", "", 36), Sample(STORE, 3.0, 1488, "redis", "", 35)]
    cold, here, peer, store = rows_of(samples)
    assert (cold.ttft_seconds, cold.speedup) == (6.0, 1.0)
    assert (here.speedup, peer.speedup, store.speedup) == pytest.approx((60.0, 12.0, 3.0))
    assert (peer.transfer_engine, store.transfer_bytes) == ("nixl", 35)


def rate(method: str, num_blocks: int, num_bytes: int, seconds: float) -> Rate:
    return Rate(method, num_blocks, num_bytes, (seconds, seconds, 10 * seconds))


def rates() -> list[Rate]:
    """nixl takes 2 ms and a byte a nanosecond, gRPC ten times that."""
    made = []
    for count in NUM_BLOCKS:
        num_bytes = count * 1_000_000
        made += [rate(COPY, count, num_bytes, num_bytes / 8e9), rate(RAW, count, num_bytes, num_bytes / 1e9)]
        for name, factor in (("grpc", 10), ("nixl", 1)):
            made.append(rate(f"{name} engine", count, num_bytes, factor * num_bytes / 1e9))
            made.append(rate(f"{name} fetch", count, num_bytes, factor * (0.002 + num_bytes / 1e9)))
    return made


def test_transfer_costs_are_of_the_best_engine() -> None:
    costs = transfer_costs(rates())
    assert costs.fixed_seconds == pytest.approx(0.002)
    assert costs.bytes_per_second == pytest.approx(1e9)
    without = transfer_costs([each for each in rates() if each.method != RAW])
    assert without.bytes_per_second == pytest.approx(1e8)
    with pytest.raises(BenchmarkError, match="busy"):
        transfer_costs([Rate("grpc fetch", count, 1000 * count, (1.0,)) for count in NUM_BLOCKS])


# Beside the simulator


def test_a_run_that_took_what_steps_take_is_simulated_as_it_was() -> None:
    run = alone("d", *(Request(10.0 * i, 100 + 40 * i, 5) for i in range(8)))
    compared = compare([run] * 2, routing.COMPARED, TRANSFER)
    assert [each.what for each in compared] == ["TTFT mean", "TTFT p50", "TTFT p99"]
    assert [each.ratio for each in compared] == pytest.approx([1.0] * 3)
    # Warm-up said that steps take twice as long.
    assert [each.from_warm_up / each.live for each in compared] == pytest.approx([2.0] * 3)


def test_a_report_has_every_part() -> None:
    results = Results(rates=rates())
    results.add_runs("a", [streams_and_prompts(setup) for setup in interference.SETUPS])
    requests = [Request(0.0, 600, 4, "prefix-1", 512), Request(5.0, 560, 4, "prefix-1", 512)]
    results.add_runs("d", [alone(name.value, *requests, routing=name) for name in routing.ROUTINGS])
    for _ in range(2):
        runs = [
            Run(goodput.name_of(setup, per_second), setup, alone("", Request(0.0, 300, 4)).served, observed())
            for setup in goodput.SETUPS
            for per_second in goodput.RATES
        ]
        results.add_runs("e", runs)
    results.add_runs("f", [streams_and_bursts(setup) for setup in bursts.SETUPS])
    results.samples = [Sample(COLD, 6.0, 0, "", "", 0), Sample(HERE, 0.1, 1488, "", "", 0)]
    results.samples += [Sample(PEER, 2.0, 1488, "nixl", "", 36), Sample(STORE, 1.0, 1488, "redis", "", 36)]
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(render(results, MACHINE))
    text = console.export_text()
    for expected in ("1 both, whole prompts", "1950 ms", "nixl fetch", "at least 80%", "60.0 ×", "not at least 4 ×"):
        assert expected in text
    for expected in ("round-robin", "They cross nowhere here", "at warm-up", "Abacus"):
        assert expected in text
    values = json.loads(json.dumps(to_json(results, MACHINE, {"quick": True})))
    assert set(values["rows"]) == set(PARTS)
    assert len(values["runs"]["e"]) == 2


def test_rows_are_over_the_repeats_together() -> None:
    def run(*seconds: float) -> Run:
        requests = tuple(served(Request(0.0, 100, 2), each, 0.1) for each in seconds)
        return Run("policy", COLOCATED, requests, observed(), RoutingName.POLICY)

    rows = rows_of_runs(PARTS["d"], [[run(1.0)], [run(5.0)], [run(2.0, 3.0, 4.0)]])
    assert rows["policy"]["TTFT mean"] == pytest.approx(3.0)
    assert rows["policy"]["TTFT p50"] == pytest.approx(3.0)
    assert rows["policy"]["TTFT p99"] == pytest.approx(5.0)


def test_gaps_of_all_repeats_count() -> None:
    one, other = streams_and_prompts(), streams_and_prompts(interference.CHUNKED)
    alone, both = (interference.COMPARED["gap p99"]([run.outcomes for run in runs]) for runs in ([one], [one, other]))
    assert alone == both == pytest.approx(2.0)
    assert interference.numbers_of([one, one]) == pytest.approx(interference.numbers_of([one]))


def test_nothing_is_as_much_as_nothing() -> None:
    assert Comparison("1 both", "goodput", 0.0, 0.0, 0.0).ratio == 1.0
    assert math.isnan(Comparison("1 both", "goodput", 0.0, 1.0, 1.0).ratio_from_warm_up)
    assert Comparison("1 both", "goodput", 2.0, 1.0, 3.0).ratio_from_warm_up == 1.5
