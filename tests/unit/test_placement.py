"""Placement by predicted cost: closed forms, cases whose answer is plain, and what holds of every choice."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from shared.policy.placement import (
    STORE,
    NoWorker,
    Plan,
    Request,
    Role,
    TransferRates,
    WorkerView,
    by_depth,
    candidates,
    choose,
    plans,
)
from shared.policy.step_costs import StepCosts

# A step takes 10 ms, and 0.1 ms more for each token.
COSTS = StepCosts([(1, 0.0101), (1001, 0.1101)])
FASTER = StepCosts([(1, 0.00505), (1001, 0.05505)])
BUDGET = 500
# 100 KB of KV a token: 1 ms and 0.01 ms a token on a fast link, 10 ms a token on a slow one.
FAST = TransferRates(1e5, 0.001, 1e10)
SLOW = TransferRates(1e5, 0.001, 1e7)


def step(num_tokens: float) -> float:
    return 0.01 + 0.0001 * num_tokens


def worker(
    name: str,
    role: Role = "both",
    *,
    decoding: int = 0,
    waiting: int = 0,
    backlog: int = 0,
    kv_usage: float = 0.0,
    prefix: int = 0,
    coming: int = 0,
    costs: StepCosts = COSTS,
) -> WorkerView:
    return WorkerView(name, role, costs, BUDGET, 100_000, decoding, waiting, backlog, kv_usage, prefix, coming)


def placed(request: Request, *workers: WorkerView, rates: TransferRates = FAST, seed: int = 0) -> Plan:
    return choose(request, workers, rates, random.Random(seed))


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


# What holds of every choice


def random_case(rng: random.Random) -> tuple[Request, list[WorkerView], TransferRates]:
    num_tokens = rng.randint(1, 8000)
    request = Request(num_tokens, rng.uniform(1, 500), rng.choice([0, rng.randint(0, num_tokens)]))
    workers = [
        worker(
            str(i),
            rng.choice(["both", "prefill", "decode"]),
            decoding=rng.randint(0, 600),
            waiting=(waiting := rng.randint(0, 5)),
            backlog=sum(rng.randint(1, 3000) for _ in range(waiting)),
            kv_usage=rng.random(),
            prefix=rng.choice([0, rng.randint(0, num_tokens)]),
            costs=rng.choice([COSTS, FASTER]),
        )
        for i in range(rng.randint(1, 8))
    ]
    return request, workers, TransferRates(1e5, 0.001, 10 ** rng.uniform(6, 11), 10 ** rng.uniform(6, 11))


def test_the_chosen_plan_is_sound_and_nearly_the_cheapest() -> None:
    rng = random.Random(1)
    num_chosen = 0
    for _ in range(2000):
        request, workers, rates = random_case(rng)
        roles = {each.worker_id: each.role for each in workers}
        held = {each.worker_id: each.prefix_tokens for each in workers}
        if set(roles.values()) == {"prefill"}:
            with pytest.raises(NoWorker):
                choose(request, workers, rates, rng)
            continue
        num_chosen += 1
        found = plans(request, workers, rates)
        plan = choose(request, workers, rates, rng)
        assert plan in found
        assert plan.cost <= 1.03 * min(each.cost for each in found)
        for plan in found:
            assert roles[plan.decode] != "prefill"
            assert plan.prefill is None or (roles[plan.prefill] != "decode" and plan.prefill != plan.decode)
            assert min(plan.ttft, plan.delay + 1e-9, plan.harm + 1e-9, plan.transfer_seconds + 1e-9) > 0
            where = plan.prefill or plan.decode
            assert plan.fetch != where
            assert (plan.fetch is None) == (plan.fetch_tokens == 0)
            if plan.fetch is not None:
                depth = request.store_tokens if plan.fetch == STORE else held[plan.fetch]
                assert held[where] + plan.fetch_tokens <= min(depth, request.num_tokens - 1)


def test_more_load_or_less_prefix_never_costs_less() -> None:
    rng = random.Random(2)
    for _ in range(500):
        request, (first, *_), rates = random_case(rng)
        better = first._replace(role="both")
        worse = better._replace(
            num_decoding=better.num_decoding + rng.randint(0, 20),
            backlog_tokens=better.backlog_tokens + rng.randint(0, 2000) * (better.num_waiting > 0),
            prefix_tokens=rng.randint(0, better.prefix_tokens),
            kv_usage=rng.uniform(better.kv_usage, 1),
        )
        request = request._replace(store_tokens=0)
        (before,), (after,) = plans(request, [better], rates), plans(request, [worse], rates)
        # But for half of the step under way, which is shorter where the one before ends with few tokens.
        assert after.cost >= before.cost - 0.5 * step(BUDGET + 700)


def test_costs_that_fall_where_they_should_rise_choose_nothing_for_that() -> None:
    """As a noisy machine measures them: no plan gains by others' waiting, and there always is one."""
    dented = StepCosts([(1, 0.010), (8, 0.030), (9, 0.031), (128, 0.050)])
    for _ in range(100):
        dented.observe(9, 0.005)
    assert dented.seconds(9) < dented.seconds(8)
    for num_decoding in range(12):
        views = [worker("a", costs=dented, decoding=num_decoding), worker("b", costs=dented)]
        plan = choose(Request(40, 2000.0), views, FAST, random.Random(0))
        assert plan.harm >= 0
        assert plan.delay >= 0


@pytest.mark.parametrize("workers", [[], [worker("p", "prefill")]])
def test_nobody_can_decode(workers: list[WorkerView]) -> None:
    with pytest.raises(NoWorker):
        choose(Request(10, 10), workers, FAST, random.Random(0))


def test_the_same_dice_choose_the_same() -> None:
    workers = [worker(str(i)) for i in range(8)]
    first, again = ([placed(Request(10, 10), *workers, seed=seed).decode for seed in range(50)] for _ in range(2))
    assert first == again
    assert len(set(first)) > 4


# Candidates


class CountedDraws(random.Random):
    """Counts the random numbers drawn."""

    num_drawn = 0

    def getrandbits(self, k: int, /) -> int:
        self.num_drawn += 1
        return super().getrandbits(k)


class CountedReads(list[str]):
    """Counts the elements read."""

    num_read = 0

    def __getitem__(self, index: object) -> str:  # type: ignore[override]
        self.num_read += 1
        return super().__getitem__(index)  # type: ignore[call-overload,no-any-return]


def test_candidates_are_the_deepest_holders_and_a_few_of_each_role() -> None:
    prefixes = {"a": 16, "b": 64, "c": 64, "d": 32, "e": 0}
    assert by_depth(prefixes) == [["b", "c"], ["d"], ["a"]]
    decoders, prefillers = [f"d{i}" for i in range(30)], ["p0", "p1"]
    found = candidates(by_depth(prefixes), [decoders, prefillers], random.Random(0))
    assert set(found[:3]) == {"b", "c", "d"}
    assert len(set(found) & set(decoders)) == 4
    assert set(found) >= {"p0", "p1"}
    assert len(found) == len(set(found)) == 9
    # A holder that is drawn as well comes once.
    assert candidates([["p0"]], [["p0", "p1"]], random.Random(0)) == ["p0", "p1"]
    assert candidates([], [], random.Random(0)) == []


def test_holders_alike_are_drawn_by_chance() -> None:
    rng = random.Random(0)
    holders = [[str(i) for i in range(12)]]
    counts = Counter(found for _ in range(2000) for found in candidates(holders, [], rng))
    assert all(abs(counts[str(i)] - 500) < 80 for i in range(12))


@pytest.mark.parametrize("size", [100, 10_000])
def test_looking_for_candidates_costs_the_same_in_any_pool(size: int) -> None:
    pools = [CountedReads(f"{role}{i}" for i in range(size)) for role in "pd"]
    holders = [CountedReads(f"d{i}" for i in range(size))]
    rng = CountedDraws(0)
    assert len(candidates(holders, pools, rng)) <= 11
    assert sum(each.num_read for each in (*pools, *holders)) <= 11
    assert rng.num_drawn < 40


# Rates


def test_rates_start_from_the_prior_and_learn() -> None:
    rates = TransferRates(1e5, 0.001, 1e8, store_bytes_per_second=1e7)
    assert rates.seconds("a", "b", 0) == 0.0
    assert rates.seconds("a", "b", 100) == pytest.approx(0.001 + 0.1)
    assert rates.seconds(STORE, "b", 100) == pytest.approx(0.001 + 1.0)
    for _ in range(60):
        rates.observe("a", "b", 10**8, 0.001 + 0.1)
    assert rates.rate("a", "b") == pytest.approx(1e9, rel=0.01)
    assert rates.rate("b", "a") == 1e8
    rates.forget("b")
    assert rates.rate("a", "b") == 1e8


def test_one_odd_transfer_moves_a_rate_little_and_a_tiny_one_not_at_all() -> None:
    rates = TransferRates(1e5, 0.001, 1e8)
    rates.observe("a", "b", 10**8, 1000.0)
    assert 0.8e8 < rates.rate("a", "b") < 1e8
    before = rates.rate("a", "b")
    rates.observe("a", "b", 10, 0.0015)
    rates.observe("a", "b", 0, 5.0)
    assert rates.rate("a", "b") == before


def test_a_transfer_that_failed_is_tried_again_ever_later() -> None:
    now = 0.0
    rates = TransferRates(1e5, 0.001, 1e8, clock=lambda: now)
    usual = rates.seconds("a", "b", 100)
    for pause in (1, 2, 4, 8, 16, 32, 60, 60):
        rates.failed("a", "b")
        assert rates.seconds("a", "b", 100) == math.inf
        assert rates.seconds("a", "b", 0) == 0
        assert rates.seconds("b", "a", 100) == usual
        now += pause - 0.01
        assert rates.seconds("a", "b", 100) == math.inf
        now += 0.01
        assert rates.seconds("a", "b", 100) == usual
    rates.observe("a", "b", 10, 0.001)
    rates.failed("a", "b")
    now += 1
    assert rates.seconds("a", "b", 100) == usual, "it had worked in between"
    rates.failed("a", "b")
    rates.forget("a")
    assert rates.seconds("a", "b", 100) == usual


def test_where_transfers_fail_prompts_are_computed() -> None:
    now = 0.0
    rates = TransferRates(1e5, 0.001, 1e10, clock=lambda: now)
    busy, prefiller = worker("d", "decode", decoding=50), worker("p", "prefill")
    assert placed(Request(4000, 100), busy, prefiller, rates=rates).prefill == "p"
    rates.failed("p", "d")
    assert placed(Request(4000, 100), busy, prefiller, rates=rates).prefill is None
