from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Callable

import pytest

from shared.policy import step_costs
from shared.policy.step_costs import StepCosts

MEASURED = [(1, 0.010), (4, 0.013), (8, 0.021)]
# By how much one step may move the estimate at its own size, as a factor.
MOST = math.exp(step_costs._WEIGHT * step_costs._MOST_ERROR)


def test_costs_are_linear_between_what_was_measured() -> None:
    costs = StepCosts(MEASURED)
    assert [costs.seconds(n) for n in (1, 2, 4, 6, 8)] == pytest.approx([0.010, 0.011, 0.013, 0.017, 0.021])
    assert costs.seconds(0) == pytest.approx(0.010)
    assert costs.seconds(2.5) == pytest.approx(0.0115)
    # Beyond, in proportion.
    assert costs.seconds(24) == pytest.approx(3 * 0.021)
    assert StepCosts([(4, 0.02)]).seconds(1) == pytest.approx(0.02)


@pytest.mark.parametrize("factor", [0.1, 0.5, 2.5, 10.0])
@pytest.mark.parametrize("size", [1, 3, 4, 6, 8, 20])
def test_costs_learn_what_is_observed(size: int, factor: float) -> None:
    costs = StepCosts(MEASURED)
    true = factor * costs.seconds(size)
    errors = []
    for _ in range(300):
        costs.observe(size, true)
        errors.append(abs(costs.seconds(size) - true))
    assert errors[-1] < 1e-3 * true
    assert all(later < earlier or earlier < 1e-12 for earlier, later in itertools.pairwise(errors))


@pytest.mark.parametrize("size", [1, 3, 4, 6, 8, 20])
def test_a_step_that_took_many_times_as_long_moves_the_estimate_no_further_than_a_slow_one(size: int) -> None:
    def after(factor: float) -> float:
        costs = StepCosts(MEASURED)
        before = costs.seconds(size)
        costs.observe(size, factor * before)
        return costs.seconds(size) / before

    assert 1 < after(10) <= MOST * (1 + 1e-9)
    assert after(10) == pytest.approx(after(10_000))
    assert 1 > after(0.1) >= 1 / MOST * (1 - 1e-9)
    assert after(0.1) == pytest.approx(after(0.0001))
    assert 1 < after(1.05) < after(10)


def test_what_is_learnt_of_one_size_is_half_learnt_of_all() -> None:
    costs = StepCosts([(1, 0.010), (4, 0.013), (8, 0.021), (16, 0.05)])
    before = [costs.seconds(n) for n in (1, 4, 8, 16)]
    costs.observe(4, 2 * 0.013)
    one, four, eight, sixteen = (costs.seconds(n) / old for n, old in zip((1, 4, 8, 16), before, strict=True))
    assert four > one > 1
    assert one == eight == sixteen == pytest.approx(math.sqrt(four))
    costs = StepCosts([(1, 0.010), (4, 0.013), (8, 0.021), (16, 0.05)])
    costs.observe(6, 1.0)
    one, four, eight, sixteen = (costs.seconds(n) / old for n, old in zip((1, 4, 8, 16), before, strict=True))
    assert four == eight > one == sixteen > 1, "both sizes around it"


def test_a_step_beyond_the_largest_size_says_nothing_of_small_ones() -> None:
    costs = StepCosts(MEASURED)
    costs.observe(100, 60.0)
    assert [costs.seconds(n) for n in (1, 4)] == [0.010, 0.013]
    assert costs.seconds(8) > 0.021


@pytest.mark.parametrize(("num_tokens", "seconds"), [(0, 0.1), (-1, 0.1), (4, 0.0), (4, -1.0)])
def test_what_cannot_be_is_not_learnt(num_tokens: int, seconds: float) -> None:
    costs = StepCosts(MEASURED)
    costs.observe(num_tokens, seconds)
    assert [costs.seconds(n) for n, _ in MEASURED] == [seconds for _, seconds in MEASURED]


@pytest.mark.parametrize("seed", range(5))
def test_the_estimate_is_near_the_median_of_noise_with_a_heavy_tail(seed: int) -> None:
    dice = random.Random(seed)

    def noisy() -> float:
        return 0.02 * dice.lognormvariate(0, 0.15) * (dice.uniform(5, 50) if dice.random() < 0.05 else 1.0)

    costs, seen, estimates = StepCosts(MEASURED), [], []
    for _ in range(3000):
        seen.append(noisy())
        costs.observe(6, seen[-1])
        estimates.append(costs.seconds(6))
    median = statistics.median(seen)
    assert statistics.fmean(estimates[500:]) == pytest.approx(median, rel=0.06)
    assert all(estimate == pytest.approx(median, rel=0.4) for estimate in estimates[500:])
    assert statistics.fmean(seen) > 1.7 * median, "or there would be nothing to tell apart"


def test_costs_that_are_observed_at_all_sizes_become_the_true_function() -> None:
    dice = random.Random(1)
    sizes = (1, 2, 4, 8, 16, 32)

    def true(n: int) -> float:
        return 0.01 + 0.001 * n

    wrong: list[Callable[[int], float]] = [lambda n: 5 * true(n), lambda n: 0.2 * true(n), lambda n: 0.004 * n]
    for warmup in wrong:
        costs = StepCosts([(n, warmup(n)) for n in sizes])
        for _ in range(3000):
            size = dice.randint(1, 32)
            costs.observe(size, true(size))
        assert [costs.seconds(n) for n in range(1, 33)] == pytest.approx([true(n) for n in range(1, 33)], rel=0.02)


@pytest.mark.parametrize("seed", range(20))
def test_costs_do_not_fall_with_size_and_are_as_close_as_can_be(seed: int) -> None:
    """Against the closed form of isotonic regression: the largest of the least means of all stretches around."""
    dice = random.Random(seed)
    measured = [dice.lognormvariate(0, 0.3) * (1 + size / 6) for size in range(12)]
    costs = StepCosts(list(enumerate(measured, start=1)))
    found = [costs.seconds(size) for size in range(1, 13)]
    for i, value in enumerate(found):
        best = max(min(statistics.fmean(measured[a : b + 1]) for b in range(i, 12)) for a in range(i + 1))
        assert value == pytest.approx(best)
    assert found == sorted(found)


def test_prompts_cost_what_they_add_to_a_plain_step_of_all_that_decode() -> None:
    costs = StepCosts([(1, 0.010), (10, 0.010), (30, 0.020), (50, 0.040)])
    assert costs.seconds_of_prompts(10, 0, 10, 0.03) == 0
    # In a step that holds all that decode: what it takes longer, by the costs' share of what it took.
    assert costs.seconds_of_prompts(30, 20, 10, 0.03) == pytest.approx(0.03 * (0.020 - 0.010) / 0.020)
    # Alone in a step: no more than beside them, though the step has taken as long for them.
    assert costs.seconds_of_prompts(20, 20, 10, 0.015) == pytest.approx(0.020 - 0.010)
    # Nobody decodes, or more is verified than would decode: what the step takes longer.
    assert costs.seconds_of_prompts(20, 20, 0, 0.02) == pytest.approx(0.02)
    assert costs.seconds_of_prompts(50, 20, 10, 0.04) == pytest.approx(0.04 - 0.02)
    # Whatever the costs say, not more than the step took, and not less than nothing.
    assert costs.seconds_of_prompts(20, 20, 40, 0.01) == pytest.approx(0.01)
    for _ in range(50):
        costs.observe(30, 0.2)
    assert costs.seconds(50) < costs.seconds(30)
    assert costs.seconds_of_prompts(50, 20, 30, 0.04) == 0
