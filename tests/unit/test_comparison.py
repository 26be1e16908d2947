"""What two ways brought in turns: by closed forms."""

from __future__ import annotations

import pytest

from shared.policy.comparison import Comparison, Side


def side(*steps: tuple[int, float | None, float]) -> Side:
    seen = Side()
    for step in steps:
        seen.observe(*step)
    return seen


def compared(tried: Side, gone: Side) -> Comparison:
    both = Comparison()
    both.tried, both.gone = tried, gone
    return both


def test_all_is_shared_out_over_the_time_of_all() -> None:
    assert side((3, 0.02, 0.001), (1, 0.01, 0.002), (5, 0.03, 0.0)).rate == pytest.approx(9 / 0.063)


def test_a_step_that_was_not_measured_counts_as_long_as_others_took_in_the_end() -> None:
    seen = side((7, None, 9.0), (1, 0.03, 0.0), (2, None, 0.001), (1, 0.01, 0.0), (1, 0.02, 0.0))
    assert (seen.num_steps, seen.num_measured) == (4, 3), "and none before the first that was"
    assert seen.rate == pytest.approx(5 / (4 * 0.02 + 0.001))


def test_a_step_is_left_out_with_its_tokens_and_its_share_of_what_was_waited() -> None:
    seen = side((1, 0.01, 0.002), (9, 0.05, 0.002), (2, 0.01, 0.002))
    assert seen.rate_but_longest == pytest.approx(3 / (0.02 + 2 * 0.002))


def test_before_anything_was_measured_there_is_no_rate() -> None:
    seen = side((3, None, 0.1))
    assert (seen.rate, seen.rate_but_longest, seen.num_steps) == (0, 0, 0)
    seen.observe(3, 0.02, 0.0)
    assert seen.rate == pytest.approx(150)
    assert seen.rate_but_longest == 0, "without the only one"


def test_there_are_as_many_steps_as_there_were_of_both() -> None:
    both = compared(side(*[(1, 0.01, 0.0)] * 5), side((1, 0.01, 0.0), (1, None, 0.0), (1, None, 0.0)))
    assert (both.num_steps, both.num_measured) == (3, 1)


@pytest.mark.parametrize("is_tried", [True, False])
@pytest.mark.parametrize(("longest", "is_certain"), [(0.02, True), (0.2, False), (60.0, False)])
def test_what_hangs_on_one_step_is_not_certain(is_tried: bool, longest: float, is_certain: bool) -> None:
    """Of one two tokens in 40 ms, of the other one in 10, but for one of its steps."""
    steady, better = side(*[(2, 0.04, 0.0)] * 8), side(*[(1, 0.01, 0.0)] * 7, (1, longest, 0.0))
    assert better.rate_but_longest > steady.rate
    assert (better.rate > steady.rate) is is_certain
    both = compared(better, steady) if is_tried else compared(steady, better)
    assert both.is_certain(1.0) is is_certain


def test_it_is_certain_of_far_less_before_it_is_of_less() -> None:
    both = compared(side(*[(3, 0.01, 0.0)] * 4), side(*[(2, 0.01, 0.0)] * 4))
    assert [both.is_certain(share) for share in (0.6, 0.66, 0.67, 1.0)] == [False, False, True, True]
