"""What two ways brought in turns: by closed forms."""

from __future__ import annotations

from random import Random

import pytest

from shared.policy.comparison import Comparison, Side


def side(*steps: tuple[int, float | None, float]) -> Side:
    seen = Side()
    for step in steps:
        seen.observe(*step)
    return seen


def test_all_is_shared_out_over_the_time_of_all() -> None:
    seen = side((3, 0.02, 0.001), (1, 0.02, 0.002), (5, 0.02, 0.0))
    assert seen.step_seconds == pytest.approx(0.02)
    assert seen.rate == pytest.approx(9 / 0.063)


def test_a_step_that_was_not_measured_counts_as_long_as_others_took_in_the_end() -> None:
    seen = side((1, None, 0.0), (1, 0.03, 0.0), (1, None, 0.001), (1, 0.01, 0.0), (1, 0.01, 0.0))
    assert (seen.num_steps, seen.num_measured) == (5, 3)
    assert seen.rate == pytest.approx(5 / (5 * 0.01 + 0.001)), "and the longest as long as the next"


@pytest.mark.parametrize("stall", [0.1, 60.0, 1e9])
def test_the_longest_step_says_nothing_wherever_it_is(stall: float) -> None:
    rng = Random(1)
    steps: list[tuple[int, float | None, float]] = [
        (rng.randint(1, 5), 0.01 * (1 + rng.random()), 0.0) for _ in range(9)
    ]
    took = sorted(seconds for _, seconds, _ in steps if seconds is not None)
    for at in range(len(steps)):
        stalled = [(tokens, stall if i == at else seconds, 0.0) for i, (tokens, seconds, _) in enumerate(steps)]
        others = sorted(seconds for i, (_, seconds, _) in enumerate(steps) if i != at and seconds is not None)
        assert side(*stalled).step_seconds == pytest.approx(
            (sum(others) + others[-1]) / 9, rel=1e-6 if stall < 1e6 else 1e-3
        )
    assert side(*steps).step_seconds == pytest.approx((sum(took[:-1]) + took[-2]) / 9)


def test_before_anything_was_measured_there_is_no_rate() -> None:
    compared = Comparison()
    assert (compared.tried.rate, compared.num_steps, compared.num_measured, compared.smaller_share) == (0, 0, 0, 1)
    compared.tried.observe(3, None, 0.1)
    assert (compared.tried.rate, compared.num_steps, compared.smaller_share) == (0, 0, 1)
    compared.tried.observe(3, 0.02, 0.0)
    assert compared.tried.step_seconds == 0.02


def test_the_smaller_share_is_of_whichever_brings_less() -> None:
    compared = Comparison()
    for tokens, seen in ((3, compared.tried), (1, compared.gone)):
        for _ in range(4):
            seen.observe(tokens, 0.01, 0.0)
    compared.gone.observe(1, None, 0.0)
    assert (compared.num_steps, compared.num_measured) == (4, 4)
    assert compared.smaller_share == pytest.approx(1 / 3)
    compared.tried, compared.gone = compared.gone, compared.tried
    assert compared.smaller_share == pytest.approx(1 / 3)
