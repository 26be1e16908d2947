"""The policy of targets that draft themselves, against closed forms and a worker of arithmetic."""

from __future__ import annotations

import random

import pytest

from shared.policy.self_drafting import SelfDraftingPolicy
from shared.policy.step_costs import StepCosts


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def flat(seconds: float = 0.01) -> StepCosts:
    """Eight rows cost what one does, and from there on each as much again."""
    return StepCosts([(1, seconds), (8, seconds), (80, 10 * seconds)])


def best_count(costs: StepCosts, load: int, likelihoods: list[float], spent: float) -> int:
    """By trying all."""
    rates = [
        (load + sum(likelihoods[:count])) / (costs.seconds(load + count) + spent)
        for count in range(len(likelihoods) + 1)
    ]
    return max(range(len(rates)), key=lambda count: (rates[count], -count))


@pytest.mark.parametrize("load", [1, 4, 20])
@pytest.mark.parametrize("seed", range(5))
def test_as_many_rows_are_verified_as_bring_most_tokens_a_second(load: int, seed: int) -> None:
    rng = random.Random(seed)
    likelihoods = sorted((rng.random() ** 2 for _ in range(40)), reverse=True)
    costs, spent = flat(), rng.random() * 0.01
    assert SelfDraftingPolicy(costs, Clock()).num_rows(load, likelihoods, spent) == best_count(
        costs, load, likelihoods, spent
    )


def test_rows_that_cost_nothing_are_all_verified_and_such_as_cost_a_step_none() -> None:
    policy = SelfDraftingPolicy(flat(), Clock())
    assert policy.num_rows(1, [0.01] * 7, 0.0) == 7
    steep = SelfDraftingPolicy(StepCosts([(1, 0.01), (100, 1.0)]), Clock())
    assert steep.num_rows(1, [0.9] * 7, 0.0) == 0


def serve(
    policy: SelfDraftingPolicy, clock: Clock, load: int, gain: float, seconds: float, num_steps: int
) -> tuple[float, float]:
    """Steps of a worker whose plain ones take 10 ms and bring a token each, and whose others take `seconds`, drafting
    included, and bring `gain`: tokens a second over those of the better way, and the share of steps with drafts."""
    rng = random.Random(1)
    began, num_tokens, num_drafted = clock.now, 0, 0
    for _ in range(num_steps):
        drafts = policy.drafts(load)
        took = (seconds if drafts else 0.01) * rng.lognormvariate(0, 0.1)
        clock.now += took
        brought = sum(int(gain) + (rng.random() < gain % 1) for _ in range(load)) if drafts else load
        policy.observe(load, drafts, brought, took)
        num_tokens += brought
        num_drafted += drafts
    best = load * max(gain / seconds, 1 / 0.01)
    return num_tokens / (clock.now - began) / best, num_drafted / num_steps


@pytest.mark.parametrize("load", [1, 8])
@pytest.mark.parametrize(
    ("gain", "seconds"), [(2.5, 0.015), (1.3, 0.012), (3.9, 0.03), (1.0, 0.012), (1.4, 0.02), (1.1, 0.05)]
)
def test_the_better_way_is_gone_but_for_a_hundredth_of_the_time(load: int, gain: float, seconds: float) -> None:
    clock = Clock()
    policy = SelfDraftingPolicy(flat(), clock)
    serve(policy, clock, load, gain, seconds, 500)
    rate, _ = serve(policy, clock, load, gain, seconds, 4000)
    assert rate > 0.97


def test_it_comes_back_when_it_begins_to_pay() -> None:
    clock = Clock()
    policy = SelfDraftingPolicy(flat(), clock)
    serve(policy, clock, 1, 1.0, 0.015, 1000)
    assert serve(policy, clock, 1, 1.0, 0.015, 1000)[1] < 0.1
    serve(policy, clock, 1, 3.0, 0.015, 3000)
    assert serve(policy, clock, 1, 3.0, 0.015, 1000)[1] > 0.9


def test_steps_that_bring_nothing_end_nobody() -> None:
    policy = SelfDraftingPolicy(flat(), Clock())
    for _ in range(100):
        policy.observe(1, policy.drafts(1), 0, 0.001)


def test_a_trial_ends_whatever_is_seen_of_it() -> None:
    """Where steps say nothing, as others drafted in them anyway."""
    clock = Clock()
    policy = SelfDraftingPolicy(flat(), clock)
    for _ in range(20):
        policy.observe(1, True, 2, 0.01)
    chosen = [policy.drafts(1) for _ in range(20)]
    assert chosen == [False] * 8 + [True] * 12


def test_a_further_step_of_the_drafter_must_bring_what_its_time_is_worth() -> None:
    clock = Clock()
    policy = SelfDraftingPolicy(flat(), clock)
    assert policy.goes_on(1, 0.0)  # nobody knows yet what it takes
    policy.observe_drafting(1, 0.002)
    for _ in range(20):
        policy.observe(1, False, 1, 0.01)  # a token in 10 ms
    assert policy.goes_on(1, 0.21)
    assert not policy.goes_on(1, 0.19)
