"""What steps bring: by closed forms."""

from __future__ import annotations

from statistics import mean

import pytest

from shared.policy.goodput import Goodput, Yield


def test_the_latest_fifty_steps_count_most() -> None:
    goodput = Goodput()
    for tokens in [1] * 1000 + [3] * 50:
        goodput.observe(tokens, 0.01, 0.002)
    kept = 0.98**50
    assert goodput.rate == pytest.approx((kept + 3 * (1 - kept)) / 0.012)
    assert goodput.step_seconds == pytest.approx(0.01)
    assert goodput.seconds_apart == pytest.approx(0.012)
    assert goodput.num_seen == 1050


def test_steps_told_of_together_count_as_if_one_by_one() -> None:
    together, one_by_one = Goodput(), Goodput()
    for tokens, num in ((1, 40), (2, 30), (1, 8)):
        together.observe(tokens * num, 0.01 * num, 0.0, num)
        for _ in range(num):
            one_by_one.observe(tokens, 0.01, 0.0)
    assert together.rate == pytest.approx(one_by_one.rate)
    assert together.num_steps == pytest.approx(one_by_one.num_steps)


def test_the_first_sixty_steps_count_alike_and_later_ones_a_sixtieth() -> None:
    found, tokens = Yield(), [1, 4, 2, 7] * 15
    for each in tokens:
        found.observe(each)
    assert found.mean == pytest.approx(mean(tokens))
    found.observe(9)
    after = mean(tokens) + (9 - mean(tokens)) / 60
    assert found.mean == pytest.approx(after)
    found.observe(30 * 2, 30)
    assert found.mean == pytest.approx(after / 2 + 1)
    found.observe(100 * 5, 100)
    assert found.mean == pytest.approx(5), "of more than are remembered"
