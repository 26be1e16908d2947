"""The simulator: closed forms, conservation, skipping ahead, what it reads and what it reports."""

from __future__ import annotations

import io
import itertools
import json
import math
import random
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from services.cli.simulate import simulate
from services.simulator.blocks import Blocks
from services.simulator.cluster import Cluster, Pools, TooLarge
from services.simulator.costs import CostsError, linear_costs, read_step_costs
from services.simulator.holders import Holders
from services.simulator.machine import ByKind, Machine
from services.simulator.outcomes import Outcomes, quantiles, weighted_quantiles
from services.simulator.pool_sizes import least_of_both, least_separate
from services.simulator.report import Objectives, PlotUnavailable, drawing, plot, summarise, table
from services.simulator.routing import ByPolicy, Route, Routing, RoutingName
from services.simulator.trace import TraceError, read_trace
from services.simulator.workload import Lengths, Request, SharedPrefixes, Workload
from shared.policy.placement import TransferRates

# A step takes 10 ms, and 0.04 ms more for each token.
COSTS = linear_costs(0.01, 25_000, 512)
MACHINE = Machine(COSTS, max_batch_tokens=512, max_sequences=128, num_blocks=4000, block_size=16)
RATES = TransferRates(1e5, 0.002, 1e9)
ALONE = Pools(num_both=1)


def step(num_tokens: int) -> float:
    return 0.01 + num_tokens / 25_000


def run(requests: list[Request], pools: Pools = ALONE, machine: Machine = MACHINE, **options: object) -> Outcomes:
    return Cluster(pools, machine, RATES, **options).run(requests)  # type: ignore[arg-type]


def counts(outcomes: Outcomes) -> dict[float, int]:
    """Tokens by the seconds since the one before, as far as these can be told apart."""
    return {round(seconds, 9): count for seconds, count in outcomes.inter_token.items()}


# Closed forms


def test_one_request_takes_its_steps() -> None:
    outcomes = run([Request(5.0, 1200, 101)])
    assert outcomes.ttft[0] == pytest.approx(2 * step(512) + step(176))
    assert outcomes.tpot[0] == pytest.approx(step(1))
    assert outcomes.seconds == pytest.approx(2 * step(512) + step(176) + 100 * step(1))
    assert counts(outcomes) == {step(1): 100}
    assert outcomes.workers[0].busy_seconds == pytest.approx(outcomes.seconds)


@pytest.mark.parametrize("num_streams", [1, 7, 100])
def test_streams_together_take_a_step_a_token(num_streams: int) -> None:
    outcomes = run([Request(0.0, 1, 500)] * num_streams)
    # The first to come has a step to itself; all others are a step behind.
    assert list(outcomes.tpot[1:]) == pytest.approx([step(num_streams)] * (num_streams - 1), rel=3e-3)
    assert weighted_quantiles(outcomes.inter_token, [0.5]) == pytest.approx([step(num_streams)])


def test_decodes_come_first_and_a_chunk_fills_what_is_left() -> None:
    first, second = Request(0.0, 10, 1000), Request(0.1, 1500, 1)
    outcomes = run([first, second])
    # It comes in the middle of a step, then has three of 511, 511 and 478 tokens beside the first stream's one.
    rest = (step(10) + 9 * step(1)) - 0.1
    assert 0 < rest < step(1)
    assert min(outcomes.ttft) == pytest.approx(step(10))
    assert max(outcomes.ttft) == pytest.approx(rest + 2 * step(512) + step(479))
    assert counts(outcomes) == {step(1): 996, step(512): 2, round(step(479), 9): 1}


def test_a_hand_over_delays_the_second_token_and_not_the_first() -> None:
    outcomes = run([Request(0.0, 2000, 100)], Pools(num_prefill=1, num_decode=1), routing=RoutingName.ROUND_ROBIN)
    assert outcomes.ttft[0] == pytest.approx(3 * step(512) + step(464))
    transfer = RATES.seconds("prefill-0", "decode-1", 2000)
    assert counts(outcomes) == {step(1): 98, round(transfer + step(1), 9): 1}
    assert outcomes.tpot[0] == pytest.approx((transfer + 99 * step(1)) / 99)


def test_attention_costs_what_is_attended_to() -> None:
    machine = replace(MACHINE, attention_seconds=1e-6, context_seconds=5e-6, longest_run=1)
    outcomes = run([Request(0.0, 600, 4)], machine=machine)
    # Whatever the chunks, every token of the prompt attends to itself and to those before it.
    assert outcomes.ttft[0] == pytest.approx(step(512) + step(88) + 1e-6 * 600 * 601 / 2)
    gaps = sorted(outcomes.inter_token)
    assert gaps == pytest.approx([step(1) + 5e-6 * context for context in (600, 601, 602)], abs=1e-9)


def test_workers_of_one_machine_slow_each_other_down() -> None:
    machine = replace(MACHINE, beside_another=ByKind(prompts=1.5, streams=3.0))
    requests = [Request(0.0, 500, 1), Request(0.001, 400, 1), Request(5.0, 300, 1)]
    outcomes = run(requests, Pools(num_both=2), machine=machine, routing=RoutingName.ROUND_ROBIN)
    ttft = dict(zip(outcomes.order, outcomes.ttft, strict=True))
    # The second begins beside the first; the third is alone again.
    assert [ttft[place] for place in range(3)] == pytest.approx([step(500), 1.5 * step(400), step(300)])


def test_latency_comes_before_the_first_token_alone() -> None:
    requests = [Request(0.0, 300, 20), Request(0.1, 300, 20)]
    near, far = (run(requests, machine=replace(MACHINE, latency_seconds=seconds)) for seconds in (0.0, 0.25))
    assert list(far.ttft) == pytest.approx([ttft + 0.25 for ttft in near.ttft])
    assert list(far.tpot) == pytest.approx(list(near.tpot))
    assert sorted(far.order) == [0, 1]


def test_links_carry_one_thing_after_another() -> None:
    requests = [Request(0.0, 512, 2), Request(0.0, 512, 2)]
    outcomes = run(requests, Pools(num_prefill=1, num_decode=1), routing=RoutingName.ROUND_ROBIN)
    transfer = RATES.seconds("prefill-0", "decode-1", 512)
    assert step(512) < transfer
    # The second leaves a step later, and then waits for the first.
    assert sorted(outcomes.tpot) == pytest.approx([transfer + step(1), 2 * transfer - step(512) + step(1)])


def test_a_prefix_is_found_again() -> None:
    prompt = Request(0.0, 1000, 5, "system", 800)
    outcomes = run([prompt, prompt._replace(time=10.0), Request(20.0, 1000, 5, "other", 800)])
    assert list(outcomes.ttft) == pytest.approx([step(512) + step(488), step(200), step(512) + step(488)])
    assert (outcomes.prompt_tokens, outcomes.cached_tokens) == (3000, 800)


def test_a_prefix_that_is_being_computed_is_waited_for() -> None:
    # The second comes in the first one's second step of four, and has its own ten tokens computed in the last; on the
    # other worker, which is idle, it would take four itself.
    requests = [Request(0.0, 2000, 1, "p", 1536), Request(0.05, 1546, 1, "p", 1536)]
    outcomes = run(requests, Pools(num_both=2))
    assert outcomes.cached_tokens == 1536
    assert min(outcomes.ttft) == pytest.approx(3 * step(512) + step(464 + 10) - 0.05)


def test_a_conversation_finds_what_came_before() -> None:
    turns = [Request(10.0 * turn, 480 * (turn + 1), 5, "chat", 480 * (turn + 1)) for turn in range(4)]
    outcomes = run(turns)
    assert list(outcomes.ttft) == pytest.approx([step(480)] * 4)


def test_a_prefix_gives_way_when_it_is_oldest() -> None:
    machine = replace(MACHINE, num_blocks=100)
    prompt, other = Request(0.0, 800, 1, "system", 800), Request(10.0, 1200, 1)
    outcomes = run([prompt, other, prompt._replace(time=20.0)], machine=machine)
    # The last blocks of the prefix went: 25 of 50 are left.
    assert outcomes.cached_tokens == 400


def test_the_youngest_is_preempted_and_computed_again() -> None:
    machine = replace(MACHINE, num_blocks=40)
    old, young = Request(0.0, 320, 100), Request(0.001, 240, 100)
    outcomes = run([old, young], machine=machine)
    assert outcomes.workers[0].num_preemptions == 1
    assert len(outcomes.ttft) == 2
    # 40 blocks hold both until the old one has 352 tokens, the young one 272: the next needs a block for each.
    (gap,) = (gap for gap in outcomes.inter_token if gap > 0.2)
    num_more = 100 - 34
    assert gap == pytest.approx(num_more * step(1) + step(240 + 34), rel=0.05)


def test_the_mean_wait_is_that_of_m_d_1() -> None:
    """One step a prompt: deterministic service, so the mean wait is ρ D / (2 (1 - ρ)) (Pollaczek and Khinchine)."""
    service, load = step(512), 0.7
    workload = Workload(load / service, 60_000, Lengths(512), Lengths(1))
    outcomes = run(list(workload.requests(1)))
    wait = fmean(outcomes.ttft) - service
    assert wait == pytest.approx(load * service / (2 * (1 - load)), rel=0.05)
    assert outcomes.workers[0].busy_seconds / outcomes.seconds == pytest.approx(load, rel=0.02)


# Conservation


def busy_workload(num_requests: int = 400, rate: float = 30.0) -> Workload:
    prefixes = SharedPrefixes(10, 200, share=0.7)
    return Workload(rate, num_requests, Lengths(200, 0.8), Lengths(60, 0.8), 1.5, prefixes)


POOLS = [Pools(num_both=3), Pools(2, 2), Pools(1, 3), Pools(num_decode=3)]


@pytest.mark.parametrize("routing", RoutingName)
@pytest.mark.parametrize("pools", POOLS, ids=str)
@pytest.mark.parametrize("num_blocks", [180, 300, 3000])
def test_all_ends_and_every_token_is_counted(routing: RoutingName, pools: Pools, num_blocks: int) -> None:
    requests = list(busy_workload().requests(0))
    cluster = Cluster(pools, replace(MACHINE, num_blocks=num_blocks, max_sequences=48), RATES, routing)
    outcomes = cluster.run(requests)  # which looks after itself that nothing is left on any worker
    assert outcomes.num_requests == len(requests)
    assert outcomes.num_output_tokens == sum(request.num_output_tokens for request in requests)
    assert sum(outcomes.inter_token.values()) == sum(request.num_output_tokens - 1 for request in requests)
    assert all(count > 0 and seconds > 0 for seconds, count in outcomes.inter_token.items())
    assert sum(map(math.isnan, outcomes.tpot)) == sum(request.num_output_tokens == 1 for request in requests)
    assert min(outcomes.ttft) > 0.0
    assert all(worker.busy_seconds <= outcomes.seconds * (1 + 1e-9) for worker in outcomes.workers)
    assert outcomes.prompt_tokens >= sum(request.num_prompt_tokens for request in requests)


@pytest.mark.parametrize(
    "pools", [Pools(), Pools(num_prefill=2), Pools(1, 0, 1), Pools(0, 1, 1), Pools(-1, 2)], ids=str
)
def test_pools_that_cannot_work(pools: Pools) -> None:
    with pytest.raises(ValueError, match="decode workers"):
        Cluster(pools, MACHINE, RATES)


def test_a_request_that_never_fits_is_refused() -> None:
    with pytest.raises(TooLarge, match=r"at 3 s has 60000 tokens of prompt and 4001 of output: .* 64000 together"):
        run([Request(3.0, 60_000, 4001)])
    assert run([Request(3.0, 60_000, 4000)]).num_requests == 1


def test_a_step_holds_a_token_of_every_sequence() -> None:
    with pytest.raises(ValueError, match="600 sequences do not fit a step of 512 tokens"):
        replace(MACHINE, max_sequences=600)


# Skipping ahead


@pytest.mark.parametrize("routing", RoutingName)
@pytest.mark.parametrize("pools", POOLS, ids=str)
@pytest.mark.parametrize(("num_blocks", "seed"), [(180, 0), (300, 1), (3000, 2)])
def test_skipping_ahead_equals_step_by_step(routing: RoutingName, pools: Pools, num_blocks: int, seed: int) -> None:
    # Odd numbers: else things on two workers happen in the same moment, and rounding says which is first.
    machine = replace(MACHINE, costs=linear_costs(0.0101237, 24_731.3, 512), num_blocks=num_blocks, max_sequences=48)
    rates = TransferRates(101_373.7, 0.0021713, 1e9)
    requests = list(busy_workload(300).requests(seed))
    fast, slow = (
        Cluster(pools, replace(machine, longest_run=longest), rates, routing, seed).run(requests)
        for longest in (machine.longest_run, 1)
    )
    assert sorted(fast.ttft) == pytest.approx(sorted(slow.ttft), rel=1e-9)
    fast_tpot, slow_tpot = ([each for each in run.tpot if not math.isnan(each)] for run in (fast, slow))
    assert sorted(fast_tpot) == pytest.approx(sorted(slow_tpot), rel=1e-9)
    assert (fast.prompt_tokens, fast.cached_tokens) == (slow.prompt_tokens, slow.cached_tokens)
    assert [each.num_preemptions for each in fast.workers] == [each.num_preemptions for each in slow.workers]
    assert sorted(fast.inter_token.elements()) == pytest.approx(sorted(slow.inter_token.elements()), rel=1e-9)


class CountedCluster(Cluster):
    """Counts the events."""

    num_events = 0

    def _at(self, when: float, act: Callable[..., None], *arguments: object) -> None:
        self.num_events += 1
        super()._at(when, act, *arguments)


def test_events_do_not_grow_with_outputs_nor_with_the_pool() -> None:
    def events(num_workers: int, num_output_tokens: int) -> float:
        pools = Pools(num_workers // 2, num_workers - num_workers // 2)
        workload = Workload(2.0 * num_workers, 1000, Lengths(300), Lengths(num_output_tokens, 0.3))
        cluster = CountedCluster(pools, MACHINE, RATES)
        cluster.run(workload.requests(0))
        return cluster.num_events / 1000

    assert all(events(*sizes) < 10 for sizes in ((4, 50), (4, 800), (64, 50)))


@pytest.mark.parametrize("pools", [Pools(num_both=16), Pools(8, 8)], ids=str)
def test_a_decision_looks_at_as_many_workers_in_any_pool(pools: Pools) -> None:
    def views(factor: int) -> float:
        cluster = Cluster(Pools(*(factor * number for number in pools)), MACHINE, RATES)
        cluster.run(busy_workload(1000, rate=20.0 * factor).requests(0))
        assert isinstance(cluster.routing, ByPolicy)
        return cluster.routing.num_views / 1000

    assert views(1) <= 3 + 4 * 2
    assert views(16) <= 3 + 4 * 2
    assert views(16) == pytest.approx(views(1), rel=0.15)


# What routing brings


@pytest.mark.parametrize("pools", [Pools(num_both=4), Pools(2, 2)], ids=str)
def test_the_policy_is_better_than_the_baselines(pools: Pools) -> None:
    prefixes = SharedPrefixes(6, 2048, share=0.8)
    workload = Workload(34.0, 1500, Lengths(400, 1.0), Lengths(100, 0.8), 1.5, prefixes)
    requests = list(workload.requests(0))
    rates = TransferRates(1e5, 0.002, 1e10)
    p99 = {name: quantiles(Cluster(pools, MACHINE, rates, name).run(requests).ttft, [0.99])[0] for name in RoutingName}
    assert p99[RoutingName.POLICY] < 0.8 * p99[RoutingName.ROUND_ROBIN]
    assert p99[RoutingName.POLICY] < 0.8 * p99[RoutingName.AFFINITY]


def test_affinity_finds_each_prefix_where_it_was() -> None:
    requests = [Request(float(i), 800, 2, f"prefix-{i % 5}", 640) for i in range(50)]
    outcomes = run(requests, Pools(num_both=4), routing=RoutingName.AFFINITY)
    assert outcomes.cached_tokens == 45 * 640


def test_a_prefix_is_fetched_where_that_is_faster() -> None:
    prefix = Request(0.0, 4096, 400, "system", 4000)
    requests = [prefix] + [prefix._replace(time=2.0 + 0.001 * i, num_prompt_tokens=4400) for i in range(40)]
    fast = Cluster(Pools(num_both=2), MACHINE, TransferRates(1e5, 0.002, 1e11)).run(requests)
    slow = Cluster(Pools(num_both=2), MACHINE, TransferRates(1e5, 0.002, 1e6)).run(requests)
    # With the first, all but the first request find it; with the second, another computes it.
    assert fast.cached_tokens == 40 * 4000
    assert slow.cached_tokens < 40 * 4000


@pytest.mark.parametrize(("begun_there", "begun_here"), [(None, None), (10.0, None), (10.0, 10.004), (10.004, 10.0)])
def test_a_fetch_waits_for_the_steps_of_both(begun_there: float | None, begun_here: float | None) -> None:
    """First for the one where the blocks come to, then for the one where they are."""

    class Placed(Routing):
        """By the prefix: "p" is on the first worker, and who asks for it at 10.01 s fetches it from there."""

        def place(self, request: Request, now: float) -> Route:
            there, here = cluster.workers
            if now == 10.01:
                return Route(here, source=there, fetch_tokens=160)
            return Route(here if now == begun_here else there)

    cluster = Cluster(Pools(num_both=2), MACHINE, RATES)
    cluster.routing = Placed()
    requests = [Request(0.0, 200, 1, "p", 160), Request(10.01, 200, 1, "p", 160)]
    requests += [Request(begun, 500, 1) for begun in (begun_there, begun_here) if begun is not None]
    outcomes = cluster.run(sorted(requests))
    (fetched,) = [ttft for order, ttft in zip(outcomes.order, outcomes.ttft, strict=True) if order == len(requests) - 1]
    here_free = 10.01 if begun_here is None else begun_here + step(500)
    there_free = here_free if begun_there is None else max(here_free, begun_there + step(500))
    came = there_free + RATES.seconds("0", "1", 160)
    assert fetched == pytest.approx(came - 10.01 + step(40))


def test_the_seed_determines_everything() -> None:
    def numbers(seed: int) -> list[float]:
        requests = busy_workload(200).requests(seed)
        return list(Cluster(Pools(num_both=6), MACHINE, RATES, seed=seed).run(requests).ttft)

    assert numbers(3) == numbers(3)
    assert numbers(3) != numbers(4)


# Parts


def test_blocks_are_conserved_whatever_happens() -> None:
    """Random sequences own, extend and leave prefixes; the holders told of it agree with the blocks."""
    rng = random.Random(0)
    for _ in range(30):
        depths: dict[str, int] = {}

        def changed(prefix_id: str, before: int, after: int, depths: dict[str, int] = depths) -> None:
            assert depths.pop(prefix_id, 0) == before
            if after:
                depths[prefix_id] = after

        blocks = Blocks(60, changed)
        owned: list[tuple[str, int]] = []
        for _ in range(300):
            prefix_id = rng.choice("abc")
            if rng.random() < 0.5:
                found, wanted = blocks.depth(prefix_id), rng.randint(1, 20)
                if wanted + blocks.num_unowned(prefix_id) <= blocks.num_allocatable:
                    blocks.own(prefix_id)
                    blocks.allocate(wanted)
                    owned.append((prefix_id, wanted - blocks.extend(prefix_id, found + rng.randint(0, wanted))))
            elif owned and rng.random() < 0.7:
                prefix_id, count = owned.pop(rng.randrange(len(owned)))
                blocks.release(count)
                blocks.disown(prefix_id)
            else:
                blocks.receive(prefix_id, rng.randint(1, 30))
            blocks.check()
            assert {each: blocks.depth(each) for each in "abc" if blocks.depth(each)} == depths
        for prefix_id, count in owned:
            blocks.release(count)
            blocks.disown(prefix_id)
        assert blocks.num_owned == 0
        blocks.check()


def test_holders_are_known_by_depth() -> None:
    holders, depths = Holders(), dict.fromkeys(map(str, range(20)), 0)
    rng = random.Random(0)
    for _ in range(2000):
        worker, depth = rng.choice(list(depths)), rng.choice([0, 1, 2, 5])
        holders.change("p", worker, depths[worker], depth)
        depths[worker] = depth
    levels = [set(level) for level in holders.deepest("p", 2)]
    expected = [{worker for worker, depth in depths.items() if depth == wanted} for wanted in (5, 2)]
    assert levels == expected
    for worker, depth in depths.items():
        holders.change("p", worker, depth, 0)
    assert not list(holders.deepest("p", 3))
    assert not list(holders.deepest("unknown", 3))


def test_quantiles_are_the_least_values_that_so_many_are_not_above() -> None:
    assert quantiles([3.0, 1.0, math.nan, 2.0, 4.0], [0.25, 0.5, 0.51, 1.0]) == [1.0, 2.0, 3.0, 4.0]
    assert all(math.isnan(value) for value in quantiles([], [0.5]) + weighted_quantiles({}, [0.5]))
    rng = random.Random(0)
    weights = Counter(rng.randint(0, 9) / 10 for _ in range(100))
    shares = [0.01, 0.1, 0.5, 0.9, 0.99, 1.0]
    assert weighted_quantiles(weights, shares) == quantiles(weights.elements(), shares)


# Workloads


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


# Traces


def written(folder: Path, text: str, name: str = "trace.jsonl") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


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


# Pool sizes


def test_the_fewest_workers_are_found_with_few_simulations() -> None:
    """Against all of them, for needs that are random but never grow with more workers."""
    rng = random.Random(0)
    for _ in range(300):
        most = rng.randint(1, 40)
        needed = rng.randint(1, 50)
        # Decode workers that are needed beside so many prefill workers, which never become more.
        beside = sorted((rng.randint(1, 60) for _ in range(most)), reverse=True)
        calls = 0

        def meets(pools: Pools, needed: int = needed, beside: list[int] = beside) -> bool:
            nonlocal calls
            calls += 1
            return pools.num_both >= needed if pools.num_both else pools.num_decode >= beside[pools.num_prefill - 1]

        assert least_of_both(meets, most) == (Pools(num_both=needed) if needed <= most else None)
        assert calls <= 13
        calls = 0
        totals = [p + d for p, d in enumerate(beside, 1) if p + d <= most]
        found = least_separate(meets, most)
        assert (found.num_workers if found is not None else None) == min(totals, default=None)
        assert found is None or meets(found)
        assert calls <= 4 * most + 1


# Reports


def small_run() -> Outcomes:
    return run(list(busy_workload(100).requests(0)), Pools(1, 2))


def test_a_summary_adds_up() -> None:
    outcomes = small_run()
    summary = summarise(outcomes, Objectives(0.1, 0.012))
    good = sum(t <= 0.1 and not p > 0.012 for t, p in zip(outcomes.ttft, outcomes.tpot, strict=True))
    assert 0 < good < 100
    assert summary.attainment == pytest.approx(good / 100)
    assert summary.goodput == pytest.approx(good / outcomes.seconds)
    assert summary.ttft.p50 <= summary.ttft.p90 <= summary.ttft.p99 <= max(outcomes.ttft)
    assert [worker.role for worker in summary.workers] == ["prefill", "decode", "decode"]
    assert all(0 < worker.utilisation <= 1 for worker in summary.workers)
    assert 0 < summary.prefix_hit_rate < 1


def test_a_summary_is_plain_json_even_of_one_token_each() -> None:
    summary = summarise(run([Request(0.0, 10, 1)]), Objectives(1.0, 0.05))
    values = json.loads(json.dumps(summary.as_json(), allow_nan=False))
    assert values["tpot"] == {"mean": None, "p50": None, "p90": None, "p99": None}
    assert values["ttft"]["p50"] == pytest.approx(step(10))
    assert values["attainment"] == 1.0


def test_a_table_has_a_column_for_each_run() -> None:
    summary = summarise(small_run(), Objectives(1.0, 0.05))
    one_token = summarise(run([Request(0.0, 10, 1)]), Objectives(1.0, 0.05))
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(table({"policy": summary, "other": one_token}))
    text = console.export_text()
    for expected in ("policy", "other", "TTFT p99", "TPOT p50", "inter-token p90", "busy, decode", "goodput"):
        assert expected in text
    assert f"{1000 * summary.ttft.p99:.1f} ms" in text


def test_without_matplotlib_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(PlotUnavailable, match="needs matplotlib, which is not installed: pip install matplotlib"):
        drawing()


def test_a_plot_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot(tmp_path / "plot.png", {"policy": small_run()}, Objectives(1.0, 0.05))
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


# The command


def command(*arguments: str) -> tuple[int, str]:
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(simulate)
    result = CliRunner().invoke(app, arguments, terminal_width=200, env={"COLUMNS": "200"})
    return result.exit_code, result.output


def test_the_command_simulates_and_writes_json(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    code, text = command(
        *("--prefill", "1", "--decode", "2", "--rate", "10", "--requests", "200", "--prefixes", "4"),
        *("--routing", "policy", "--routing", "affinity", "--json", str(path)),
    )
    assert code == 0, text
    assert "policy" in text
    runs = json.loads(path.read_text())
    assert [run["name"] for run in runs] == ["policy", "affinity"]
    assert all((run["num_prefill"], run["num_decode"], run["num_both"]) == (1, 2, 0) for run in runs)
    assert all(run["requests"] == 200 for run in runs)


def test_a_result_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    code, text = command("--requests", "10", "--json", str(tmp_path))
    assert code == 1
    assert text.endswith(f"outrider: {tmp_path} cannot be written: Is a directory\n")


def test_hardly_any_burstiness_is_none() -> None:
    regular, hardly = (Workload(2.0, 20, Lengths(9), Lengths(9), burstiness) for burstiness in (0.0, 1e-300))
    assert list(regular.requests(1)) == list(hardly.requests(1))


def test_the_command_takes_costs_from_logs_of_steps(tmp_path: Path) -> None:
    # A step of any size takes 0.3 s, by one worker's log; by the other's 0.1.
    logs = []
    for name, seconds in (("slow", 0.3), ("fast", 0.1)):
        line = {"seconds": seconds, "sequences": 1, "prefill_tokens": 0, "prefill_attended": 0, "context_tokens": 0}
        steps = ({**line, "time": 10 * i, "tokens": 2**i} for i in range(11))
        logs += ["--step-log", str(written(tmp_path, "\n".join(map(json.dumps, steps)), name))]
    result = tmp_path / "result.json"
    found = []
    for chosen in (logs[:2], logs[2:], logs):
        code, text = command(*chosen, "--rate", "0.1", "--requests", "40", "--json", str(result))
        assert code == 0, text
        found.append(json.loads(result.read_text())[0]["tpot"]["mean"])
    assert found[0] == pytest.approx(0.3, rel=0.05)
    assert found[1] == pytest.approx(0.1, rel=0.05)
    assert found[1] < found[2] < found[0]


def test_the_command_finds_pool_sizes(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    options = ("--plan", "--rate", "30", "--requests", "300", "--output-variation", "0.2")
    code, text = command(*options, "--slo-ttft", "0.3", "--slo-tpot", "0.04", "--json", str(path))
    assert code == 0, text
    assert "goodput per worker" in text
    runs = json.loads(path.read_text())
    assert runs
    assert all(run["attainment"] >= 0.95 for run in runs)
    code, text = command(*options, "--slo-tpot", "0.001", "--most-workers", "4")
    assert code == 1
    assert text.endswith("outrider: no pools of up to 4 workers meet the SLOs\n")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--trace", "nowhere.csv"], "nowhere.csv"),
        (["--step-costs", "nowhere.json"], "nowhere.json"),
        (["--step-log", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--step-log", "one", "--step-costs", "other"], "--step-log and --step-costs both say what steps cost"),
        (["--plan", "--both", "3"], "--plan finds the pools: --prefill, --decode and --both are not for it"),
        (["--plan", "--routing", "policy", "--routing", "affinity"], "--plan takes one --routing"),
        (["--json", "nowhere/result.json"], "--json 'nowhere/result.json': there is no folder 'nowhere'"),
        (["--plot", "nowhere/result.png"], "--plot 'nowhere/result.png': there is no folder 'nowhere'"),
        (["--burstiness", "inf"], "less than or equal to"),
        (["--prompt-variation", "1e300"], "less than or equal to"),
        (["--prompt-tokens", "inf"], "less than or equal to"),
        (["--rate", "inf"], "less than or equal to"),
        (["--step-seconds", "inf"], "less than or equal to"),
        (["--prefill", "2"], "a service needs decode workers"),
        (["--kv-tokens", "64"], "a worker has room for 64 together"),
        (["--max-batch-tokens", "100"], "256 sequences do not fit a step of 100 tokens"),
    ],
)
def test_the_command_says_what_is_wrong(arguments: list[str], complaint: str) -> None:
    code, text = command(*arguments)
    assert code == 2
    assert complaint in text
