from __future__ import annotations

import itertools
import random
import statistics

import pytest

from shared.policy import overhead
from shared.policy.overhead import Overhead

EXPECTED = 0.02


def learnt(*measured: tuple[int, int, float]) -> Overhead:
    """Of each load and γ so many seconds beyond the expected, seen often."""
    found = Overhead()
    for load, gamma, seconds in measured:
        for _ in range(300):
            found.observe(load, gamma, EXPECTED, EXPECTED + seconds, 1.0)
    return found


def test_nothing_is_added_before_anything_was_seen() -> None:
    assert Overhead().seconds(8, 4) == 0.0


@pytest.mark.parametrize("excess", [0.005, -0.005, 0.1])
def test_what_is_beyond_the_expected_is_learnt(excess: float) -> None:
    found = Overhead()
    errors = []
    for _ in range(600):
        found.observe(4, 2, EXPECTED, EXPECTED + excess, 1.0)
        errors.append(abs(found.seconds(4, 2) - excess))
    assert errors[-1] < 1e-3 * abs(excess)
    assert all(later < earlier or earlier < 1e-12 for earlier, later in itertools.pairwise(errors))


def test_a_measurement_ten_times_as_long_moves_it_no_further_than_a_slow_one() -> None:
    def moved(seconds: float, num_before: int) -> float:
        found = Overhead()
        for _ in range(num_before):
            found.observe(4, 2, EXPECTED, EXPECTED, 1.0)
        found.observe(4, 2, EXPECTED, seconds, 1.0)
        return found.seconds(4, 2)

    most = overhead._MOST_ERROR * EXPECTED
    for num_before in (0, 3, 100):
        assert 0 < moved(10 * EXPECTED, num_before) <= most
        assert moved(10 * EXPECTED, num_before) == moved(1e6 * EXPECTED, num_before)
        assert moved(EXPECTED / 10, num_before) == -moved(10 * EXPECTED, num_before)
    assert moved(10 * EXPECTED, 100) == pytest.approx(overhead._WEIGHT * most)
    assert moved(10 * EXPECTED, 0) > moved(10 * EXPECTED, 3) > moved(10 * EXPECTED, 100), "the first few say more"


@pytest.mark.parametrize("seed", range(5))
def test_the_estimate_is_near_the_median_of_noise_with_a_heavy_tail(seed: int) -> None:
    dice = random.Random(seed)
    found = Overhead()
    seen, estimates = [], []
    for _ in range(4000):
        seconds = 1.3 * EXPECTED * dice.lognormvariate(0, 0.1) * (dice.uniform(3, 30) if dice.random() < 0.05 else 1)
        seen.append(seconds)
        found.observe(8, 0, EXPECTED, seconds, 1.0)
        estimates.append(EXPECTED + found.seconds(8, 0))
    median = statistics.median(seen)
    assert statistics.fmean(estimates[500:]) == pytest.approx(median, rel=0.02)
    assert all(estimate == pytest.approx(median, rel=0.1) for estimate in estimates[500:])
    assert statistics.fmean(seen) > 1.3 * median, "or there would be nothing to tell apart"


def test_what_many_see_of_the_same_step_counts_once() -> None:
    one, many = Overhead(), Overhead()
    for _ in range(40):
        one.observe(8, 4, EXPECTED, EXPECTED + 0.05, 1.0)
        for _ in range(8):
            many.observe(8, 4, EXPECTED, EXPECTED + 0.05, 1 / 8)
    assert many.seconds(8, 4) == pytest.approx(one.seconds(8, 4), rel=0.05)


@pytest.mark.parametrize(("alike", "other"), [((4, 5, 7), 8), ((8, 15), 7), ((2, 3), 1)])
def test_loads_within_a_power_of_two_count_alike(alike: tuple[int, ...], other: int) -> None:
    found = learnt((alike[0], 2, 0.004), (other, 2, 0.009))
    assert {found.seconds(load, 2) for load in alike} == {found.seconds(alike[0], 2)}
    assert found.seconds(other, 2) == pytest.approx(0.009, rel=1e-3)


@pytest.mark.parametrize(
    ("load", "gamma", "nearest"),
    [
        (4, 2, 0.001),
        (6, 3, 0.001),  # γ 3 of the same load: 2 is nearer than 8
        (4, 6, 0.002),
        (2, 8, 0.002),  # loads next to each other, then γ
        (1, 1, 0.001),
        (300, 2, 0.003),  # the load counts before γ
        (64, 0, 0.003),
    ],
)
def test_what_was_not_seen_borrows_from_the_nearest_load_then_gamma(load: int, gamma: int, nearest: float) -> None:
    found = learnt((4, 2, 0.001), (4, 8, 0.002), (64, 8, 0.003))
    assert found.seconds(load, gamma) == pytest.approx(nearest, rel=1e-3)


def test_what_is_seen_for_the_first_time_starts_from_what_it_borrowed() -> None:
    found = learnt((4, 2, 0.004))
    found.observe(4, 3, EXPECTED, EXPECTED + 0.004, 1.0)
    assert found.seconds(4, 3) == pytest.approx(0.004, rel=1e-3)
    for _ in range(200):
        found.observe(4, 3, EXPECTED, EXPECTED, 1.0)
    assert found.seconds(4, 3) == pytest.approx(0.0, abs=1e-4)
    assert found.seconds(4, 2) == pytest.approx(0.004, rel=1e-3), "its own stays its own"
