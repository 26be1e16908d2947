"""What holds of every choice of a placement, and who is a candidate for it."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from shared.policy.placement import (
    STORE,
    NoWorker,
    Request,
    TransferRates,
    WorkerView,
    by_depth,
    candidates,
    choose,
    plans,
)
from shared.policy.step_costs import StepCosts
from tests.support.placement import BUDGET, COSTS, FAST, FASTER, placed, step, worker

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
