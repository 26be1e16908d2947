"""How closely it is looked for copies: by what that brings, against what is known of it."""

from __future__ import annotations

import random

import pytest

from shared.policy.looking import Looking


def look(looking: Looking, spared: float, spent: float, num_steps: int, seed: int = 1) -> float:
    """Steps in which a close look spares a step that often and costs so much: the share that looked closely."""
    rng = random.Random(seed)
    count = 0
    for _ in range(num_steps):
        if looking.closely():
            count += 1
            looking.observe(float(rng.random() < spared), spent * rng.lognormvariate(0, 0.3))
    return count / num_steps


@pytest.mark.parametrize(("spared", "spent", "least", "most"), [(0.5, 0.1, 1.0, 1.0), (0.02, 0.1, 0.03, 0.1)])
def test_what_pays_is_done_and_what_does_not_only_now_and_then(
    spared: float, spent: float, least: float, most: float
) -> None:
    looking = Looking()
    look(looking, spared, spent, 200)
    assert least <= look(looking, spared, spent, 5000) <= most


def test_it_is_done_again_when_it_begins_to_pay() -> None:
    looking = Looking()
    look(looking, 0.0, 0.1, 1000)
    look(looking, 0.8, 0.1, 600)
    assert look(looking, 0.8, 0.1, 500) == 1.0


def test_one_that_stood_still_says_little() -> None:
    looking = Looking()
    look(looking, 0.8, 0.1, 200)
    looking.observe(0.0, 1000.0)
    assert look(looking, 0.8, 0.1, 200) > 0.9


def test_a_new_sequence_starts_from_what_others_found() -> None:
    everybody = Looking()
    for seed in range(5):
        look(Looking(everybody), 0.0, 0.1, 100, seed)
    # A look at first, and soon no more.
    assert look(Looking(), 0.0, 0.1, 320) > 28 / 320 >= look(Looking(everybody), 0.0, 0.1, 320)


def test_what_pays_rarely_is_done_on_where_it_finds_nothing_for_a_while() -> None:
    """Most looks find nothing: of many sequences that each look some hundred times hardly any gives up by chance."""
    everybody = Looking()
    look(everybody, 0.1, 0.05, 2000)
    shares = [look(Looking(everybody), 0.1, 0.05, 150, seed) for seed in range(100)]
    assert sum(share == 1.0 for share in shares) > 90


def test_where_it_does_not_pay_new_sequences_hardly_look() -> None:
    everybody = Looking()
    shares = [look(Looking(everybody), 0.02, 0.06, 150, seed) for seed in range(60)]
    assert sum(shares[20:]) / 40 < 0.2
