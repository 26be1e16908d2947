"""Placement by predicted cost: closed forms, and cases whose answer is plain."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from shared.policy.placement import STORE, Plan, Request, Role, TransferRates, choose, plans
from tests.support.placement import FAST, FASTER, SLOW, placed, step, worker

# Closed forms


def test_an_idle_worker_takes_its_steps() -> None:
    plan = placed(Request(1200, 11), worker("a"))
    assert (plan.decode, plan.prefill, plan.fetch, plan.fetch_tokens) == ("a", None, None, 0)
    assert plan.ttft == pytest.approx(2 * step(500) + step(200))
    assert (plan.harm, plan.transfer_seconds) == (0.0, 0.0)
    assert plan.delay == pytest.approx(0.0)
    assert plan.cost == pytest.approx(plan.ttft)


def test_a_busy_worker_finishes_its_step_then_what_is_ahead() -> None:
    # 700 tokens ahead beside 100 streams: 400 in the step under way, then 300 and ours.
    plan = placed(Request(200, 1), worker("a", decoding=100, backlog=700))
    assert plan.ttft == pytest.approx(0.5 * step(500) + step(500) + step(100 + 100))
    # Ours makes one step longer, for 100 streams.
    assert plan.harm == pytest.approx(100 * (step(300) - step(100)))


def test_a_further_stream_slows_those_there_and_itself() -> None:
    plan = placed(Request(1, 101), worker("a", decoding=20))
    assert plan.harm == pytest.approx(20 * (step(21) - step(20)) + 20 * 100 * (step(21) - step(20)))
    assert plan.delay == pytest.approx(100 * (step(21) - step(1)))


def test_on_a_prefill_worker_nobody_waits_and_the_first_token_waits_for_no_transfer() -> None:
    (plan,) = (
        plan for plan in plans(Request(1200, 1), [worker("p", "prefill"), worker("d", "decode")], SLOW) if plan.prefill
    )
    assert (plan.decode, plan.prefill) == ("d", "p")
    assert plan.ttft == pytest.approx(2 * step(500) + step(200))
    assert plan.transfer_seconds == pytest.approx(0.001 + 1200 * 0.01)
    assert plan.delay == pytest.approx(plan.transfer_seconds)
    assert plan.harm == 0.0


def test_what_the_decode_worker_holds_is_not_handed_over() -> None:
    workers = [worker("p", "prefill"), worker("d", "decode", prefix=1000)]
    (plan,) = (plan for plan in plans(Request(1200, 1), workers, SLOW) if plan.prefill)
    assert plan.transfer_seconds == pytest.approx(
        0.001 + 200 * 0.01 + 0.001 + 1000 * 0.01 * (plan.fetch == "d") - 0.001
    )


def test_a_fetch_hides_behind_the_queue() -> None:
    """The prompts ahead are computed while the prefix comes: only what it is late counts."""
    request = Request(1010, 1)
    holder = worker("holder", waiting=50, backlog=50_000, prefix=1000)
    idle = placed(request, worker("a"), holder)
    assert (idle.decode, idle.fetch, idle.fetch_tokens) == ("a", "holder", 1000)
    assert idle.ttft == pytest.approx(0.001 + 1000 * 1e-5 + step(10))
    queued = placed(request, worker("a", backlog=1000), holder)
    assert queued.fetch == "holder"
    assert queued.ttft == pytest.approx(0.5 * step(500) + step(500) + step(10))


# Where to


@pytest.mark.parametrize("roles", [["both"] * 4, ["decode"] * 4, ["decode", "both", "decode", "both"]])
def test_idle_workers_alike_share_evenly(roles: list[Role]) -> None:
    rng = random.Random(0)
    workers = [worker(str(i), role) for i, role in enumerate(roles)]
    counts = Counter(choose(Request(100, 50), workers, FAST, rng).decode for _ in range(4000))
    assert all(abs(counts[each.worker_id] - 1000) < 100 for each in workers)


def test_of_two_that_nearly_tie_the_one_with_fewer_streams() -> None:
    workers = [worker("a", decoding=101), worker("b", decoding=100)]
    found = plans(Request(1, 1), workers, FAST)
    assert max(plan.cost for plan in found) < 1.03 * min(plan.cost for plan in found)
    assert {placed(Request(1, 1), *workers, seed=seed).decode for seed in range(20)} == {"b"}


def test_a_long_prompt_leaves_a_busy_decode_worker_alone() -> None:
    busy, prefiller = worker("d", "decode", decoding=50), worker("p", "prefill")
    assert placed(Request(4000, 100), busy, prefiller).prefill == "p"
    # A short one is not worth a transfer.
    assert placed(Request(4, 100), busy, prefiller, rates=TransferRates(1e5, 0.02, 1e10)).prefill is None
    # Nor is a long one when the link is slow and nobody is disturbed.
    assert placed(Request(4000, 100), worker("d", "decode"), prefiller, rates=SLOW).prefill is None


def test_a_prefill_worker_with_a_long_queue_is_left_alone() -> None:
    busy, prefiller = worker("d", "decode", decoding=5), worker("p", "prefill", waiting=40, backlog=40_000)
    assert placed(Request(1000, 100), busy, prefiller).prefill is None


def test_of_pairs_the_one_with_the_faster_link() -> None:
    rates = TransferRates(1e5, 0.001, 1e8)
    for _ in range(50):
        rates.observe("p", "d2", 10**9, 0.1)
    busy = [worker(name, "decode", decoding=50) for name in ("d1", "d2")]
    plan = placed(Request(4000, 100), *busy, worker("p", "prefill"), rates=rates)
    assert (plan.prefill, plan.decode) == ("p", "d2")


def test_where_transfers_fail_prompts_are_computed() -> None:
    now = 0.0
    rates = TransferRates(1e5, 0.001, 1e10, clock=lambda: now)
    busy, prefiller = worker("d", "decode", decoding=50), worker("p", "prefill")
    assert placed(Request(4000, 100), busy, prefiller, rates=rates).prefill == "p"
    rates.failed("p", "d")
    assert placed(Request(4000, 100), busy, prefiller, rates=rates).prefill is None


def test_without_prefill_workers_prompts_are_computed_where_they_decode() -> None:
    workers = [worker("a", decoding=50), worker("b"), worker("c", "decode")]
    assert all(plan.prefill is None for plan in plans(Request(4000, 100), workers, FAST))


def test_those_of_role_both_prefill_for_others_where_there_are_prefill_workers() -> None:
    workers = [worker("a"), worker("b"), worker("p", "prefill"), worker("d", "decode")]
    pairs = {(plan.prefill, plan.decode) for plan in plans(Request(400, 100), workers, FAST)}
    assert pairs == {
        *((None, "a"), (None, "b"), (None, "d"), ("a", "b"), ("a", "d"), ("b", "a"), ("b", "d")),
        *(("p", "a"), ("p", "b"), ("p", "d")),
    }


def test_a_faster_worker_attracts() -> None:
    assert placed(Request(100, 100), worker("slow"), worker("fast", costs=FASTER)).decode == "fast"


def test_a_full_pool_repels() -> None:
    full, free = worker("full", decoding=10, kv_usage=0.999), worker("free", decoding=11, kv_usage=0.3)
    assert placed(Request(1000, 100), full, free).decode == "free"
    roomy = worker("full", decoding=10, kv_usage=0.9)
    assert placed(Request(1000, 100), roomy, free).decode == "full"
    # The prompt waits for one of the ten to end: they last 99 steps each, so for a tenth of that.
    wait = 99 * step(11) / 10
    assert placed(Request(1000, 100), full).ttft == pytest.approx(placed(Request(1000, 100), roomy).ttft + wait)
    # Where there is room for the prompt and half of the output, half of the time it is preempted, and computed again.
    nearly = worker("full", decoding=10, kv_usage=1 - (1000 + 49.5) / 100_000)
    released = (100_000 - 1000 - 49.5) / 10
    again = 2 * step(500) + step(1099 - 2 * 490 + 10)
    delay = 99 * (step(11) - step(1)) + 49.5 / released * wait + 0.5 * again
    assert placed(Request(1000, 100), nearly).delay == pytest.approx(delay)


# Prefixes


def test_a_hit_is_followed_as_long_as_it_is_worth_the_queue() -> None:
    request = Request(2000, 1)
    # Held: half a step, then what is queued and one more token; cold: four steps of 60 ms.
    holder = worker("hot", backlog=1500, waiting=3, prefix=1900)
    assert placed(request, holder, worker("cold"), rates=SLOW).decode == "hot"
    queued = worker("hot", backlog=4000, waiting=8, prefix=1900)
    plan = placed(request, queued, worker("cold"), rates=SLOW)
    assert (plan.decode, plan.fetch) == ("cold", None)


def test_a_prefix_that_is_being_computed_is_followed_but_not_fetched() -> None:
    request = Request(2000, 1)
    # The step under way and two more, in place of four.
    computing, cold = worker("computing", backlog=1400, waiting=1, coming=1900), worker("cold")
    plan = placed(request, computing, cold)
    assert (plan.decode, plan.fetch) == ("computing", None)
    assert plan.ttft == pytest.approx(0.5 * step(500) + 2 * step(500) + step(1 + 2))
    assert placed(request, computing._replace(coming_tokens=0), cold).decode == "cold"
    # Too long a queue: it is computed again, for there is nothing to fetch yet.
    plan = placed(request, computing._replace(backlog_tokens=4000, num_waiting=3), cold)
    assert (plan.decode, plan.fetch) == ("cold", None)


def test_a_fast_link_fetches_and_a_slow_one_computes_again() -> None:
    request = Request(2000, 1)
    workers = worker("hot", backlog=8000, waiting=8, prefix=1900), worker("cold")
    fetched = placed(request, *workers, rates=FAST)
    assert (fetched.decode, fetched.fetch, fetched.fetch_tokens) == ("cold", "hot", 1900)
    assert placed(request, *workers, rates=SLOW).fetch is None


def test_the_store_serves_where_it_is_deeper_or_sooner() -> None:
    rates = TransferRates(1e5, 0.001, 1e7, store_bytes_per_second=1e10)
    plan = placed(Request(2000, 1, store_tokens=1800), worker("a"), rates=rates)
    assert (plan.fetch, plan.fetch_tokens) == (STORE, 1800)
    # It may hold the whole prompt, and the last token is computed all the same.
    plan = placed(Request(2000, 1, store_tokens=2000), worker("a"), rates=rates)
    assert (plan.fetch, plan.fetch_tokens) == (STORE, 1999)
    busy = worker("peer", backlog=80_000, waiting=8, prefix=1900)
    assert placed(Request(2000, 1, store_tokens=1800), worker("a"), busy, rates=rates).fetch == STORE
    slow_store = TransferRates(1e5, 0.001, 1e10, store_bytes_per_second=1e7)
    assert placed(Request(2000, 1, store_tokens=1800), worker("a"), busy, rates=slow_store).fetch == "peer"
    assert placed(Request(2000, 1, store_tokens=0), worker("a"), rates=rates).fetch is None


def test_a_prefill_worker_fetches_too() -> None:
    workers = [worker("d", "decode", decoding=60, prefix=3000), worker("p", "prefill")]
    (plan,) = (plan for plan in plans(Request(6000, 100), workers, FAST) if plan.prefill)
    assert (plan.fetch, plan.fetch_tokens) == ("d", 3000)
    assert plan.transfer_seconds == pytest.approx(2 * 0.001 + 3000 * 1e-5 + 3000 * 1e-5)


@dataclass
class Pool:
    """Workers that never end anything: what is sent there adds up."""

    size: int
    holding: dict[str, int]
    backlog: Counter[str] = field(default_factory=Counter)
    waiting: Counter[str] = field(default_factory=Counter)

    def send(self, request: Request, rates: TransferRates, rng: random.Random) -> Plan:
        views = [
            worker(
                str(i), waiting=self.waiting[str(i)], backlog=self.backlog[str(i)], prefix=self.holding.get(str(i), 0)
            )
            for i in range(self.size)
        ]
        plan = choose(request, views, rates, rng)
        held = self.holding.get(plan.decode, 0) + plan.fetch_tokens
        self.backlog[plan.decode] += request.num_tokens - held
        self.waiting[plan.decode] += 1
        self.holding[plan.decode] = request.num_tokens - 10
        return plan


@pytest.mark.parametrize("rates", [FAST, SLOW], ids=["fast", "slow"])
def test_a_hot_prefix_gathers_and_then_spreads(rates: TransferRates) -> None:
    """200 requests with a prefix of 4000 tokens that only worker 0 holds at first; 10 tokens are their own."""
    pool, rng = Pool(4, {"0": 4000}), random.Random(0)
    sent = [pool.send(Request(4010, 50), rates, rng) for _ in range(200)]
    first_elsewhere = next(i for i, plan in enumerate(sent) if plan.decode != "0")
    assert 1 <= first_elsewhere < 150
    assert (sent[first_elsewhere].fetch == "0") == (rates is FAST)
    assert len({plan.decode for plan in sent}) > 1
    # At most a copy each.
    assert sum(plan.fetch is not None for plan in sent) <= 3
