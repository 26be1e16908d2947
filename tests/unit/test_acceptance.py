from __future__ import annotations

import itertools
import math
import random

import pytest

from shared.policy.acceptance import Acceptance, expected_tokens

RATES = [0.0, 0.1, 0.5, 0.8, 0.95, 1.0]


def kept(dice: random.Random, rate: float, num_draft_tokens: int) -> int:
    """Of a round's draft tokens, those before the first that is rejected."""
    return next((i for i in range(num_draft_tokens) if dice.random() >= rate), num_draft_tokens)


@pytest.mark.parametrize("rate", [0.1, 0.62, 0.9])
@pytest.mark.parametrize("gamma", [1, 4, 16])
def test_acceptance_finds_the_rate_of_a_bernoulli_process(rate: float, gamma: int) -> None:
    dice = random.Random(1)
    acceptance = Acceptance()
    estimates = []
    for _ in range(4000):
        acceptance.observe(gamma, kept(dice, rate, gamma))
        estimates.append(acceptance.rate)
    # The start, 0.7, counts 16 draft tokens of at most 176.
    shrunk = rate + 16 / 176 * (0.7 - rate)
    assert sum(estimates[1000:]) / 3000 == pytest.approx(shrunk, abs=0.015)


def test_acceptance_counts_only_tokens_that_were_examined() -> None:
    one = Acceptance()
    one.observe(8, 0)
    other = Acceptance()
    other.observe(1, 0)
    assert one.rate == other.rate
    assert one.num_examined == 1
    one.observe(8, 3)
    assert one.num_examined == 5
    one.observe(8, 8)
    assert one.num_examined == 13
    none = Acceptance()
    before = none.rate
    none.observe(0, 0)
    assert none.rate == before


def test_a_new_sequence_starts_from_everybodys_rate_and_departs_from_it() -> None:
    everybody = Acceptance()
    for _ in range(200):
        everybody.observe(4, 4)
    mine = Acceptance(everybody)
    assert mine.rate == pytest.approx(everybody.rate)
    for _ in range(20):
        mine.observe(4, 0)
    assert mine.rate < everybody.rate < 1
    assert Acceptance(everybody).rate == everybody.rate


def test_acceptance_forgets() -> None:
    acceptance = Acceptance()
    for _ in range(1000):
        acceptance.observe(4, 4)
    for _ in range(300):
        acceptance.observe(4, 0)
    # A memory of 256 draft tokens: of the old ones exp(-300 / 256) is left, about 0.31.
    assert acceptance.rate < 0.4
    for _ in range(700):
        acceptance.observe(4, 0)
    assert acceptance.rate < 0.1


def test_the_rate_at_best_is_above_the_true_one_almost_always() -> None:
    """Two standard errors: in at least 95 % of cases, for however much was seen."""
    dice = random.Random(3)
    for rate in (0.3, 0.5, 0.9):
        for num_rounds in (2, 10, 40):
            num_above = 0
            for _ in range(400):
                acceptance = Acceptance()
                for _ in range(num_rounds):
                    acceptance.observe(4, kept(dice, rate, 4))
                num_above += acceptance.rate_at_best(1.0) >= rate
            assert num_above >= 0.95 * 400


def test_the_rate_at_best_nears_the_rate_with_what_was_seen_and_leaves_it_with_what_is_forgotten() -> None:
    acceptance = Acceptance()
    margins = []
    for _ in range(60):
        margins.append(acceptance.rate_at_best(1.0) - acceptance.rate)
        acceptance.observe(2, 0)
    assert all(later < earlier for earlier, later in itertools.pairwise(margins[5:]))
    assert margins[-1] == pytest.approx(1 / math.sqrt(59 + 4))
    bests = [acceptance.rate_at_best(confidence) for confidence in (1.0, 0.5, 0.1, 0.0)]
    assert bests == sorted(bests)
    assert bests[-1] == pytest.approx(acceptance.rate + 0.5), "two standard errors of a coin that was not tossed"
    for _ in range(500):
        acceptance.observe(4, 4)
    assert acceptance.rate_at_best(0.0) == 1.0


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("gamma", [0, 1, 4, 16])
def test_expected_tokens_is_the_geometric_sum(rate: float, gamma: int) -> None:
    assert expected_tokens(rate, gamma) == pytest.approx(sum(rate**i for i in range(gamma + 1)))


@pytest.mark.parametrize(("rate", "gamma"), [(0.7, 5), (0.3, 2), (0.95, 8)])
def test_expected_tokens_is_the_mean_of_simulated_rounds(rate: float, gamma: int) -> None:
    dice = random.Random(2)
    rounds = [1 + kept(dice, rate, gamma) for _ in range(20_000)]
    # Standard error below 0.02.
    assert expected_tokens(rate, gamma) == pytest.approx(sum(rounds) / len(rounds), abs=0.07)
