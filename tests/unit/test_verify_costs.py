"""What verifying takes, learnt from steps, against workers whose steps are known."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest

from shared.policy.step_costs import StepCosts
from shared.policy.verify_costs import VerifyCosts


def test_rows_that_arithmetic_bounds_are_told_from_those_that_memory_does() -> None:
    """A machine whose memory was slow when its steps were measured, and is faster now by 4 ms a step: those of eight
    rows are, and those of twelve are not."""
    costs = VerifyCosts(StepCosts([(1, 0.016), (8, 0.016), (12, 0.017), (16, 0.022)]))
    rng = random.Random(3)
    for _ in range(40):
        costs.observe(1, 0, 0.012)
    for _ in range(60):
        count = rng.choice((7, 11))
        costs.observe(1, count, {7: 0.012, 11: 0.017}[count] * rng.lognormvariate(0, 0.02))
    assert costs.seconds(1, 11) - costs.seconds(1, 7) == pytest.approx(0.005, abs=0.001)
    # Not verified for some time, it is tried again.
    for _ in range(300):
        costs.observe(1, 7, 0.012)
    assert costs.seconds(1, 11) - costs.seconds(1, 7) < 0.003


@pytest.mark.parametrize("slower", [1.5, 3.0, 10.0])
def test_costs_stay_costs_whatever_the_machine_does(slower: float) -> None:
    """Slow while steps are plain, fast while they verify, and fast again while they are plain."""
    costs = VerifyCosts(StepCosts([(1, 0.01), (2, 0.0105), (4, 0.011), (8, 0.012), (16, 0.014)]))
    for _ in range(100):
        costs.observe(1, 0, 0.01 * slower)
    for _ in range(100):
        costs.observe(1, 4, 0.011)
    for _ in range(100):
        costs.observe(1, 0, 0.01)
    assert costs.seconds(1, 4) > 0
    # And a few steps put it right.
    for _ in range(100):
        costs.observe(1, 4, 0.011)
    assert costs.seconds(1, 4) == pytest.approx(0.011, rel=0.1)


@pytest.mark.parametrize(("fixed", "each"), [(0.0, 0.0), (0.002, 0.0), (0.0, 0.0001), (0.001, 0.0002)])
@pytest.mark.parametrize("faster", [0.8, 1.0, 1.3])
def test_what_verifying_takes_as_such_is_told_from_what_each_token_does(
    fixed: float, each: float, faster: float
) -> None:
    """On a machine that is faster or slower than at warm-up, and changes by some percent while plain steps are rare."""
    warm_up = StepCosts([(1, 0.02), (8, 0.022), (32, 0.027), (128, 0.052)])
    costs, rng = VerifyCosts(warm_up), random.Random(7)
    speed = faster

    def truth(count: int) -> float:
        return speed * warm_up.seconds(8 + count) + (fixed + each * count if count else 0.0)

    for step in range(3000):
        speed = faster * (1 + 0.03 * math.sin(step / 300))
        count = 0 if step % 300 < 10 else min(int(rng.lognormvariate(2.8, 0.4)), 60)
        costs.observe(8, count, truth(count) * rng.lognormvariate(0, 0.04))
    for count in (0, 8, 16, 24, 32):
        assert costs.seconds(8, count) == pytest.approx(truth(count), rel=0.06)
    of_a_row = (truth(24) - truth(8)) / 16
    assert costs.row_seconds(8) == pytest.approx(of_a_row, rel=0.5)


def test_few_rows_are_not_taken_to_be_as_dear_as_many() -> None:
    """What only steps of many draft tokens have shown."""
    warm_up = StepCosts([(1, 0.02), (8, 0.022), (32, 0.027), (128, 0.052)])
    costs = VerifyCosts(warm_up)
    for _ in range(100):
        costs.observe(8, 64, warm_up.seconds(72) + 64 * 0.0003)
    assert costs.seconds(8, 64) == pytest.approx(warm_up.seconds(72) + 64 * 0.0003, rel=0.02)
    assert costs.seconds(8, 8) - warm_up.seconds(16) < 0.006


@pytest.mark.parametrize("load", [1, 8])
@pytest.mark.parametrize("counts", [(4,), (4, 5, 6, 7, 8), range(1, 17)])
def test_what_plain_steps_take_is_known_though_there_are_none(load: int, counts: Sequence[int]) -> None:
    warm_up = StepCosts([(1, 0.02), (8, 0.022), (32, 0.027), (128, 0.052)])
    costs, rng = VerifyCosts(warm_up), random.Random(1)
    for _ in range(20_000):
        count = load * rng.choice(counts)
        took = warm_up.seconds(load + count) + 0.001 + 0.0001 * count
        costs.observe(load, count, took * rng.lognormvariate(0, 0.04))
    assert costs.seconds(load, 0) == pytest.approx(warm_up.seconds(load), rel=0.15)
