"""How much longer plain steps take in turns with drafts: by closed forms."""

from __future__ import annotations

import pytest

from shared.policy.rest import Rest


def test_steps_on_their_own_are_taken_to_be_faster_before_there_were_any() -> None:
    rest = Rest()
    rest.compare(0.02)
    assert rest.times == 1.04
    rest.observe(0.07, 0.0, 7)
    rest.compare(0.02)
    assert rest.times == 1.04, "of seven nothing is believed"


def test_the_first_comparisons_count_alike_and_later_ones_three_tenths() -> None:
    rest, times = Rest(), [1.1, 1.3, 1.0, 1.4, 1.1]
    for each in times:
        rest.observe(0.08, 0.02, 10)
        rest.compare(0.01 * each)
    expected = (1.04 + 1.1 + 1.3) / 3
    for each in times[2:]:
        expected += 0.3 * (each - expected)
    assert rest.times == pytest.approx(expected)


@pytest.mark.parametrize(("seconds", "times"), [(0.001, 1.0), (0.5, 1.27)])
def test_what_a_bad_moment_may_have_made_is_not_believed(seconds: float, times: float) -> None:
    rest = Rest()
    rest.observe(0.1, 0.0, 10)
    rest.compare(seconds)
    assert rest.times == pytest.approx(times)


def test_what_is_faster_by_chance_makes_up_for_what_is_slower() -> None:
    rest = Rest()
    for _ in range(50):
        for times in (1.3, 0.7):
            rest.observe(1.0, 0.0, 100)
            rest.compare(0.01 * times)
    assert rest.times < 1.06


def test_steps_that_take_no_time_are_compared_with_nothing() -> None:
    rest = Rest()
    rest.observe(0.0, 0.0, 10)
    rest.compare(0.01)
    assert rest.times == 1.04


def test_steps_of_another_time_are_compared_with_nothing() -> None:
    rest = Rest()
    rest.observe(0.1, 0.0, 10)
    rest.end()
    rest.compare(0.02)
    assert rest.times == 1.04
