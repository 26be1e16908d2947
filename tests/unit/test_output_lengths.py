"""How much of an output is still to come, against distributions whose mean residual life is known."""

from __future__ import annotations

import random

import pytest

from shared.policy.output_lengths import OutputLengths


def test_before_any_has_ended_outputs_are_as_usual_and_longer_ones_go_on_as_long_again() -> None:
    outputs = OutputLengths()
    assert [outputs.remaining(n) for n in (0, 28, 64, 120, 300)] == [128, 100, 64, 120, 300]


@pytest.mark.parametrize("num_tokens", [0, 64, 100, 160, 190])
def test_of_uniform_lengths_half_of_what_is_left_follows(num_tokens: int) -> None:
    dice = random.Random(1)
    outputs, found = OutputLengths(), 0.0
    for i in range(2000):
        outputs.observe(dice.randint(64, 256))
        if i >= 1000:
            found += outputs.remaining(num_tokens) / 1000
    expected = max(160 - num_tokens, (256 - num_tokens) / 2)
    assert found == pytest.approx(expected, rel=0.5 if num_tokens > 160 else 0.25)


def test_of_outputs_of_one_length_what_is_missing_follows_and_some_at_least() -> None:
    outputs = OutputLengths()
    for _ in range(500):
        outputs.observe(128)
    assert outputs.remaining(28) == pytest.approx(100, abs=1)
    assert outputs.remaining(126) == 16
    assert outputs.remaining(400) == 400, "nobody came so far"


def test_the_latest_count() -> None:
    outputs = OutputLengths()
    for length in [1000] * 100 + [10] * 100:
        outputs.observe(length)
    assert outputs.remaining(0) == 16
