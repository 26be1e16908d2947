"""Simulated workers: closed forms, conservation, and skipping ahead."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from statistics import fmean

import pytest

from services.simulator.cluster import Cluster, Pools, TooLarge
from services.simulator.costs import linear_costs
from services.simulator.machine import ByKind
from services.simulator.outcomes import weighted_quantiles
from services.simulator.routing import ByPolicy, RoutingName
from services.simulator.workload import Lengths, Request, Workload
from shared.policy.placement import TransferRates
from tests.support.simulated_cluster import MACHINE, POOLS, RATES, busy_workload, counts, run, step


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
