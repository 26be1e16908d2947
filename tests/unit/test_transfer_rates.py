"""The rates of links: from a prior, by what is seen of transfers, and when they fail."""

from __future__ import annotations

import math

import pytest

from shared.policy.placement import STORE, TransferRates


def test_rates_start_from_the_prior_and_learn() -> None:
    rates = TransferRates(1e5, 0.001, 1e8, store_bytes_per_second=1e7)
    assert rates.seconds("a", "b", 0) == 0.0
    assert rates.seconds("a", "b", 100) == pytest.approx(0.001 + 0.1)
    assert rates.seconds(STORE, "b", 100) == pytest.approx(0.001 + 1.0)
    for _ in range(60):
        rates.observe("a", "b", 10**8, 0.001 + 0.1)
    assert rates.rate("a", "b") == pytest.approx(1e9, rel=0.01)
    assert rates.rate("b", "a") == 1e8
    rates.forget("b")
    assert rates.rate("a", "b") == 1e8


def test_one_odd_transfer_moves_a_rate_little_and_a_tiny_one_not_at_all() -> None:
    rates = TransferRates(1e5, 0.001, 1e8)
    rates.observe("a", "b", 10**8, 1000.0)
    assert 0.8e8 < rates.rate("a", "b") < 1e8
    before = rates.rate("a", "b")
    rates.observe("a", "b", 10, 0.0015)
    rates.observe("a", "b", 0, 5.0)
    assert rates.rate("a", "b") == before


def test_a_transfer_that_failed_is_tried_again_ever_later() -> None:
    now = 0.0
    rates = TransferRates(1e5, 0.001, 1e8, clock=lambda: now)
    usual = rates.seconds("a", "b", 100)
    for pause in (1, 2, 4, 8, 16, 32, 60, 60):
        rates.failed("a", "b")
        assert rates.seconds("a", "b", 100) == math.inf
        assert rates.seconds("a", "b", 0) == 0
        assert rates.seconds("b", "a", 100) == usual
        now += pause - 0.01
        assert rates.seconds("a", "b", 100) == math.inf
        now += 0.01
        assert rates.seconds("a", "b", 100) == usual
    rates.observe("a", "b", 10, 0.001)
    rates.failed("a", "b")
    now += 1
    assert rates.seconds("a", "b", 100) == usual, "it had worked in between"
    rates.failed("a", "b")
    rates.forget("a")
    assert rates.seconds("a", "b", 100) == usual
