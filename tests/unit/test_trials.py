from __future__ import annotations

import pytest

from shared.policy.trials import Trials


def try_in_vain(trials: Trials, began: float, lasted: float, gain: float = 0.0) -> float:
    """Rounds for so long, then none any more; returns when that was."""
    trials.go_on(began, gain)
    round_ended(trials, began + lasted)
    trials.end(began + lasted, gain)
    return began + lasted


def round_ended(
    trials: Trials, now: float, seconds: float = 2.0, weight: float = 1.0, which: tuple[int, int] | None = (0, 4)
) -> list[tuple[float, float]]:
    """One that should have taken a second."""
    return trials.observe_round(now, which, 1.0, seconds, weight)


def half_life(trials: Trials, now: float) -> float:
    """Seconds from now, when the last round was, until it counts half."""
    assert trials.confidence(now) == 1.0
    seconds = 1.0
    while trials.confidence(now + seconds) > 0.5:
        seconds += 1.0
    return seconds


def test_what_rounds_took_counts_less_and_less_without_any() -> None:
    trials = Trials()
    round_ended(trials, 100.0)
    counts = [trials.confidence(100.0 + seconds) for seconds in (0, 1, 10, 100, 1000)]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] == 1.0
    assert counts[-1] < 0.001


def test_each_time_that_it_is_found_again_it_is_held_against_them_longer() -> None:
    trials, now, half_lives = Trials(), 0.0, []
    for _ in range(10):
        now = try_in_vain(trials, now + 1, 0.04)
        half_lives.append(half_life(trials, now))
    assert trials.num_failed == 10
    assert half_lives == [8, 16, 32, 64, 128, 256, 512, 600, 600, 600]


@pytest.mark.parametrize(("lasted", "gain", "lost"), [(0.5, 0.0, 0.5), (2.0, 0.0, 2.0), (4.0, 0.75, 1.0)])
def test_finding_out_takes_a_small_share_of_the_time(lasted: float, gain: float, lost: float) -> None:
    trials = Trials()
    now = try_in_vain(trials, 10.0, lasted, gain)
    assert half_life(trials, now) == 160 * lost


@pytest.mark.parametrize(("gains", "lost"), [((1.0, 1.0), 2 * 0.08), ((1.5, 1.0), 0.08), ((1.0, 1.5), 0.08)])
def test_what_may_have_been_lost_is_summed_over_the_time(gains: tuple[float, float], lost: float) -> None:
    trials = Trials()
    trials.go_on(10.0, 3.0)
    for seconds, gain in enumerate(gains):
        trials.go_on(11.0 + seconds, gain)
    round_ended(trials, 12.0)
    trials.end(12.0, 1.0)
    assert half_life(trials, 12.0) == pytest.approx(max(8.0, 160 * lost), abs=1)


def test_rounds_that_paid_until_the_machine_changed_are_soon_tried_again() -> None:
    trials, now = Trials(), 0.0
    for _ in range(150):
        now += 0.1
        trials.go_on(now, 1.2)
    round_ended(trials, now)
    trials.end(now, 0.99)
    assert half_life(trials, now) == 24, "of 15 seconds a hundredth was lost, not 5 times as much"


def test_rounds_that_paid_for_long_are_soon_tried_again() -> None:
    trials, now = Trials(), 0.0
    for _ in range(3):
        now = try_in_vain(trials, now + 1, 0.04)
    now = try_in_vain(trials, now + 1, 500.0)
    assert half_life(trials, now) == 4


def test_an_end_without_a_beginning_says_nothing() -> None:
    trials = Trials()
    round_ended(trials, 5.0)
    trials.end(5.0, 0.0)
    trials.end(6.0, 0.0)
    assert half_life(trials, 5.0) == 4


def test_what_ended_for_another_reason_did_not_fail() -> None:
    trials = Trials()
    trials.go_on(1.0, 2.0)
    assert trials.running
    trials.cancel(1.5)
    trials.end(2.0, 0.0)
    assert not trials.running
    assert trials.num_failed == 0


@pytest.mark.parametrize("weight", [1.0, 0.25])
def test_the_first_rounds_of_everybody_are_told_once(weight: float) -> None:
    trials = Trials()
    assert all(not round_ended(trials, 0.5, 9.0, weight) for _ in range(50)), "before it began"
    for began in (100.0, 1000.0):
        trials.go_on(began, 1.2)
        told = [round_ended(trials, began + 1, 1.0 + i, weight) for i in range(round(10 / weight))]
        assert [len(each) for each in told if each] == [round(6 / weight)]
        assert next(each for each in told if each) == [(1.0, 1.0 + i) for i in range(round(6 / weight))]
        trials.end(began + 2, 0.5)


def test_a_trial_is_young_once_its_first_rounds_are_known_and_for_some_more() -> None:
    trials = Trials()
    trials.go_on(1.0, 1.2)
    young = []
    for _ in range(40):
        young.append(trials.young)
        round_ended(trials, 2.0)
    assert young == [False] * 6 + [True] * 26 + [False] * 8
    trials.cancel(2.0)
    trials.go_on(3.0, 1.2)
    assert not trials.young


def test_first_rounds_are_of_one_load_and_gamma() -> None:
    trials = Trials()
    trials.go_on(1.0, 1.2)
    assert not any(round_ended(trials, 2.0, 3.0, which=which) for which in [(0, 4)] * 5 + [(5, 4)] * 5 + [None] * 20)
    assert not trials.young
    assert not any(round_ended(trials, 2.0, 5.0, which=(5, 2)) for _ in range(5))
    assert round_ended(trials, 2.0, 5.0, which=(5, 2)) == [(1.0, 5.0)] * 6


def test_what_is_known_from_just_before_is_not_found_out_again() -> None:
    """Short requests with pauses: each of them is a trial."""
    trials = Trials()
    for i in range(20):
        trials.go_on(1.0 + i, 1.2)
        told = [round_ended(trials, 1.5 + i) for _ in range(8)]
        assert any(told) == (i == 0)
        trials.cancel(1.6 + i)
    trials.go_on(200.0, 1.2)
    assert any(round_ended(trials, 200.5) for _ in range(8)), "long after it is"


def test_rounds_that_pay_with_pauses_between_them_make_up_for_those_that_did_not() -> None:
    trials, now = Trials(), 0.0
    for _ in range(4):
        now = try_in_vain(trials, now + 1, 0.04)
    assert half_life(trials, now) == 64
    for i in range(8):
        assert trials.num_failed == 4, i
        trials.go_on(now, 1.3)
        for _ in range(10):
            now += 0.01
            round_ended(trials, now)
        trials.go_on(now, 1.3)
        trials.cancel(now)
        now += 1
        if i == 6:
            break
    assert trials.num_failed == 0
    assert half_life(trials, now - 1) == 4


def test_what_was_known_to_be_in_vain_is_not_forgiven_because_everybody_left() -> None:
    trials, now, half_lives = Trials(), 0.0, []
    for _ in range(4):
        now += 1000
        trials.go_on(now, 1.2)
        for _ in range(7):
            round_ended(trials, now)
        trials.go_on(now + 0.05, 0.8)
        trials.cancel(now + 0.06)
        half_lives.append(half_life(trials, now))
    assert half_lives == [8, 16, 32, 64]


@pytest.mark.parametrize(("worth", "failed", "counts_for"), [(0.9, True, 32), (1.07, True, 8), (1.09, False, 4)])
def test_what_all_brought_too_little_from_its_beginning_on_was_in_vain(
    worth: float, failed: bool, counts_for: int
) -> None:
    trials = Trials()
    trials.account(100.0, 0.0, 9999)  # before
    trials.go_on(10.0, 1.2)
    for _ in range(7):
        round_ended(trials, 12.0)
    trials.account(2.0, 2.0 * worth, 600)
    trials.go_on(12.0, 1.2)
    trials.cancel(12.0)
    assert trials.num_failed == failed
    assert half_life(trials, 12.0) == counts_for, "160 times what was lost"


@pytest.mark.parametrize(("worth", "num_failed"), [(1.07, 3), (1.09, 0)])
def test_rounds_that_brought_too_little_make_up_for_nothing(worth: float, num_failed: int) -> None:
    trials, now = Trials(), 0.0
    for _ in range(3):
        now = try_in_vain(trials, now + 1, 0.04)
    trials.go_on(now, 1.2)
    trials.account(1.0, worth, 600)
    for _ in range(70):
        round_ended(trials, now)
    trials.go_on(now, 1.2)
    assert trials.num_failed == num_failed


def test_what_came_of_short_trials_tells_together() -> None:
    """How many tokens a round brings is chance: few of them say nothing."""
    trials, now, failed = Trials(), 10.0, list[int]()
    for _ in range(12):
        trials.go_on(now, 1.2)
        for _ in range(8):
            round_ended(trials, now)
        trials.account(1.0, 0.9, 100)
        trials.cancel(now)
        now += 0.5
        failed.append(trials.num_failed)
    assert failed == [0] * 5 + [1] * 6 + [2]


def test_what_came_of_a_trial_long_ago_does_not_count_with_the_next() -> None:
    trials = Trials()
    for now, worth in ((10.0, 0.1), (500.0, 1.2)):
        trials.go_on(now, 1.2)
        for _ in range(8):
            round_ended(trials, now)
        trials.account(1.0, worth, 400)
        trials.cancel(now)
    assert trials.num_failed == 0


@pytest.mark.parametrize(("worth", "num_failed"), [(90.0, 1), (120.0, 0)])
def test_rounds_that_went_on_for_long_were_in_vain_if_they_brought_too_little(worth: float, num_failed: int) -> None:
    trials = Trials()
    trials.go_on(10.0, 1.2)
    round_ended(trials, 110.0)
    trials.account(100.0, worth, 4000)
    trials.end(110.0, 1.0)
    assert trials.num_failed == num_failed
