from __future__ import annotations

import itertools
import math
import random
import statistics

import pytest

from shared.policy import overhead
from shared.policy.overhead import Overhead, forgotten

EXPECTED = 0.02


def learnt(*measured: tuple[int, int, float]) -> Overhead:
    """Of each load and γ so many seconds beyond the expected, seen often."""
    found = Overhead()
    for load, gamma, seconds in measured:
        for _ in range(300):
            found.observe(load, gamma, EXPECTED, EXPECTED + seconds, 1.0)
    return found


def test_nothing_is_added_before_anything_was_seen() -> None:
    assert Overhead().share(8, 4) == 0.0


@pytest.mark.parametrize("excess", [0.005, -0.005, 0.1])
def test_what_is_beyond_the_expected_is_learnt(excess: float) -> None:
    found = Overhead()
    errors = []
    for _ in range(600):
        found.observe(4, 2, EXPECTED, EXPECTED + excess, 1.0)
        errors.append(abs(EXPECTED * found.share(4, 2) - excess))
    assert errors[-1] < 1e-3 * abs(excess)
    assert all(later <= earlier or earlier < 1e-9 for earlier, later in itertools.pairwise(errors))


def test_a_measurement_ten_times_as_long_moves_it_no_further_than_a_slow_one() -> None:
    def moved(seconds: float, num_before: int) -> float:
        found = Overhead()
        for _ in range(num_before):
            found.observe(4, 2, EXPECTED, EXPECTED, 1.0)
        found.observe(4, 2, EXPECTED, seconds, 1.0)
        return math.log1p(found.share(4, 2))

    most = 2 * overhead._MOST_ERROR  # of what is common and what is its own
    for num_before in (0, 3, 100):
        assert 0 < moved(10 * EXPECTED, num_before) <= most
        assert moved(10 * EXPECTED, num_before) == moved(1e6 * EXPECTED, num_before)
        assert moved(EXPECTED / 10, num_before) == pytest.approx(-moved(10 * EXPECTED, num_before))
    assert moved(10 * EXPECTED, 100) == pytest.approx((overhead._COMMON_WEIGHT + overhead._OWN_WEIGHT) / 2 * most)
    assert moved(10 * EXPECTED, 0) > moved(10 * EXPECTED, 3) > moved(10 * EXPECTED, 100), "the first few say more"


@pytest.mark.parametrize("times", [0.2, 5.0])
def test_what_was_measured_in_a_bad_moment_is_contradicted_by_a_few(times: float) -> None:
    """And that it is so holds for every γ, not for the one that was measured alone."""
    found = learnt((1, 4, 0.0), (1, 2, 0.0))
    found.correct(1, 6, [(EXPECTED, times * EXPECTED)] * 6)
    assert found.share(1, 2) == pytest.approx(times - 1, rel=0.01)
    for _ in range(8):
        found.observe(1, 6, EXPECTED, EXPECTED, 1.0)
    for gamma in (2, 4, 6):
        assert abs(found.share(1, gamma)) < 0.1


def test_behind_a_bad_moment_what_is_one_gammas_own_is_not_taken_for_everybodys() -> None:
    found = learnt((1, 4, 0.0))
    found.correct(1, 4, [(EXPECTED, 3 * EXPECTED)] * 6)
    for _ in range(8):
        found.observe(1, 4, EXPECTED, EXPECTED, 1.0)
    for _ in range(8):
        found.observe(1, 5, EXPECTED, 2 * EXPECTED, 1.0)
    assert abs(found.share(1, 4)) < 0.1
    assert found.share(1, 5) == pytest.approx(1.0, abs=0.2)


@pytest.mark.parametrize("times", [0.3, 2.0, 5.0])
def test_what_was_never_known_is_learnt_from_the_first_few(times: float) -> None:
    found = Overhead()
    changed = [found.observe(8, 3, EXPECTED, times * EXPECTED, 1.0) for _ in range(5)]
    assert None in changed
    assert 1 + found.share(8, 3) == pytest.approx(times, rel=0.1)


def test_a_few_slow_ones_in_a_row_are_no_news_once_much_was_seen() -> None:
    found = learnt((8, 3, 0.0))
    assert None not in [found.observe(8, 3, EXPECTED, 5 * EXPECTED, 1.0) for _ in range(6)]
    assert found.share(8, 3) < 0.1


def test_measured_on_purpose_it_is_believed_at_once_and_later_by_half_unless_it_is_quite_another() -> None:
    found = Overhead()
    found.correct(8, 0, [(EXPECTED, 3 * EXPECTED), (EXPECTED, 3 * EXPECTED), (EXPECTED, 30 * EXPECTED)])
    assert 1 + found.share(8, 0) == pytest.approx(3)
    found.correct(8, 0, [(EXPECTED, 3 * 1.2 * EXPECTED)])
    assert 1 + found.share(8, 0) == pytest.approx(3 * 1.2**0.5)
    found.correct(8, 0, [(EXPECTED, EXPECTED)])
    assert 1 + found.share(8, 0) == pytest.approx(1)


def test_measured_on_purpose_a_load_seen_once_or_twice_is_what_was_measured() -> None:
    """And not that, beyond what it was taken for by its neighbour's."""
    found = learnt((8, 0, EXPECTED))
    found.observe(5, 0, EXPECTED, EXPECTED, 1.0)
    found.correct(5, 0, [(EXPECTED, EXPECTED)])
    assert found.share(5, 0) == pytest.approx(0, abs=0.01)


def test_a_load_seen_once_or_twice_still_counts_as_its_neighbour() -> None:
    found = learnt((8, 3, EXPECTED))
    found.observe(5, 3, EXPECTED, EXPECTED, 1.0)
    assert found.share(5, 4) == found.share(8, 4) > 0.4
    for _ in range(60):
        found.observe(5, 3, EXPECTED, EXPECTED, 1.0)
    assert found.share(5, 4) < 0.1


def test_one_slow_step_seen_by_many_is_one() -> None:
    found = Overhead()
    assert None not in [found.observe(32, 3, EXPECTED, 5 * EXPECTED, 1 / 32) for _ in range(32)]


@pytest.mark.parametrize("seed", range(5))
def test_the_estimate_is_near_the_median_of_noise_with_a_heavy_tail(seed: int) -> None:
    dice = random.Random(seed)
    found = Overhead()
    seen, estimates = [], []
    for _ in range(4000):
        seconds = 1.3 * EXPECTED * dice.lognormvariate(0, 0.1) * (dice.uniform(3, 30) if dice.random() < 0.05 else 1)
        seen.append(seconds)
        found.observe(8, 0, EXPECTED, seconds, 1.0)
        estimates.append(EXPECTED + EXPECTED * found.share(8, 0))
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
    assert many.share(8, 4) == pytest.approx(one.share(8, 4), rel=0.05)


@pytest.mark.parametrize(("alike", "other"), [((3, 4, 5), 2), ((6, 8, 11), 5), ((23, 32, 45), 22), ((1,), 2)])
def test_loads_around_a_power_of_two_count_alike(alike: tuple[int, ...], other: int) -> None:
    found = learnt((alike[0], 2, 0.004), (other, 2, 0.009))
    assert {EXPECTED * found.share(load, 2) for load in alike} == {EXPECTED * found.share(alike[0], 2)}
    assert EXPECTED * found.share(other, 2) == pytest.approx(0.009, rel=1e-3)


@pytest.mark.parametrize(("load", "nearest"), [(4, 0.05), (6, 0.05), (2, 0.05), (1, 0.05), (40, 0.15), (300, 0.15)])
def test_what_was_not_seen_borrows_from_the_nearest_load(load: int, nearest: float) -> None:
    found = learnt((4, 2, 0.001), (64, 2, 0.003))
    common = {name: found.share(where, 3) for name, where in (("small", 4), ("large", 64))}
    assert found.share(load, 3) == common["small" if nearest == 0.05 else "large"]


def test_what_all_gammas_share_is_learnt_from_any_and_what_is_one_gammas_own_from_it_alone() -> None:
    """The machine slows down for a while and is itself again; one γ is always dearer than its size says."""
    found = Overhead()
    for slow in (0.0, 0.3, 0.0):
        for step in range(600):
            gamma = (2, 4)[step % 2]
            found.observe(8, gamma, EXPECTED, EXPECTED * (1 + slow + (0.1 if gamma == 4 else 0.0)), 1.0)
        assert found.share(8, 2) == pytest.approx(slow, abs=0.02)
        assert found.share(8, 4) == pytest.approx(slow + 0.1, abs=0.02)
    for _ in range(60):
        found.observe(8, 2, EXPECTED, 1.3 * EXPECTED, 1.0)
    assert found.share(8, 4) > 0.25, "slowed down with the other, unseen"


def test_it_counts_how_often_a_gamma_was_measured() -> None:
    found = Overhead()
    assert found.count(8, 4) == 0.0
    for _ in range(3):
        found.observe(8, 4, EXPECTED, EXPECTED, 0.5)
    assert found.count(8, 4) == found.count(7, 4) == 1.5
    assert found.count(8, 3) == found.count(16, 4) == 0.0


def test_what_was_learnt_of_a_gamma_long_ago_is_soon_learnt_anew() -> None:
    """Seen while the machine was slow, then not for long: what it took then is not its own."""
    found = Overhead()
    for _ in range(100):
        found.observe(8, 1, EXPECTED, 1.2 * EXPECTED, 1.0)
        found.observe(8, 2, EXPECTED, 1.0 * EXPECTED, 1.0)
    assert found.share(8, 1) > found.share(8, 2) + 0.15
    assert found.num_recent(8, 1) < found.count(8, 1)
    for _ in range(100):
        found.observe(8, 2, EXPECTED, EXPECTED, 1.0)
    assert found.num_recent(8, 1) < 0.1
    for _ in range(10):
        found.observe(8, 1, EXPECTED, EXPECTED, 1.0)
    assert found.share(8, 1) == pytest.approx(found.share(8, 2), abs=0.04)


def test_what_is_expected_to_take_less_has_as_much_more_overhead() -> None:
    Overhead().rescale(8, 2.0)
    found = learnt((8, 2, 0.5 * EXPECTED), (32, 2, 0.0))
    for _ in range(3):
        found.observe(7, 4, EXPECTED, 1.5 * EXPECTED, 1.0)
    found.rescale(7, 2.0)
    assert 1 + found.share(8, 2) == pytest.approx(3.0, rel=0.02)
    assert found.share(32, 2) == pytest.approx(0.0, abs=0.02)


def test_the_first_measurements_of_a_gamma_beside_known_ones_say_what_is_its_own() -> None:
    found = learnt((8, 2, 0.0))
    for _ in range(8):
        found.observe(8, 4, EXPECTED, 1.15 * EXPECTED, 1.0)
    assert 1 + found.share(8, 4) == pytest.approx(1.15, rel=0.03)
    assert found.share(8, 2) == pytest.approx(0.0, abs=0.02)


def test_what_was_measured_long_ago_is_never_as_if_it_had_not_been() -> None:
    recent = 1.0
    for _ in range(50_000):
        recent = forgotten(recent, 1.0)
    assert 0 < recent < 1e-200
    assert forgotten(0.0, 1.0) == 0, "what never was stays so"
