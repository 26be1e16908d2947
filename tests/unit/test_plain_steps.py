"""What is learnt of plain steps when the router looks at their results late."""

from __future__ import annotations

import random

import pytest

from shared.policy.plain_steps import PlainSteps
from shared.policy.step_costs import StepCosts

STEP = 0.02


def learnt(gaps: list[float]) -> float:
    """Seconds of a plain step, when results came with these gaps and should have taken STEP each."""
    steps = PlainSteps(StepCosts([(1, STEP)]))
    now = 100.0
    for gap in gaps:
        now += gap
        steps.observe(4, gap, now, now)
    return steps.seconds(4)


@pytest.mark.parametrize("late", [0.0, 0.3, 0.5, 0.9])
def test_a_result_seen_late_makes_the_next_step_short_and_both_count(late: float) -> None:
    assert learnt([(1 + late) * STEP, (1 - late) * STEP] * 200) == pytest.approx(STEP, rel=0.1)


def test_results_that_were_held_up_come_all_at_once() -> None:
    dice = random.Random(3)
    gaps = []
    for _ in range(300):
        held_up = dice.choice([0, 0, 0, 2, 4])
        gaps += [(1 + held_up) * STEP, *[0.0001] * held_up, STEP, STEP]
    assert learnt(gaps) == pytest.approx(STEP, rel=0.15)


@pytest.mark.parametrize("times", [0.2, 0.5, 2.0, 4.0])
def test_a_machine_that_became_another_is_believed(times: float) -> None:
    assert learnt([times * STEP] * 600) == pytest.approx(times * STEP, rel=0.05)


def test_a_measurement_behind_a_stall_is_not_of_the_stall() -> None:
    steps = PlainSteps(StepCosts([(1, STEP)]))
    for i in range(100):
        steps.observe(4, STEP, i * STEP, i * STEP)
    assert steps.measure_if_older(4, 1.0, 50.0, 50.0)
    now = 50.0
    for gap in (5 * STEP, 0.0001, 0.0001, 0.0001, 0.0001, *[STEP] * 5):
        now += gap
        steps.observe(4, gap, now, now)
    assert not steps.measuring
    assert steps.seconds(4) > 0.6 * STEP


def measured(*gaps: float) -> float:
    """Times STEP that is believed when a measurement gives these, after much that took STEP."""
    steps = PlainSteps(StepCosts([(1, STEP)]))
    for i in range(100):
        steps.observe(4, STEP, i * STEP, i * STEP)
    assert steps.measure_if_older(4, 1.0, 50.0, 50.0)
    now = 50.0
    for gap in gaps:
        assert steps.measuring
        now += gap * STEP
        steps.observe(4, gap * STEP, now, now)
    assert not steps.measuring
    return steps.seconds(4) / STEP


def test_what_a_measurement_finds_to_be_quite_different_is_measured_again() -> None:
    assert measured(*[1.1] * 6) == pytest.approx(1.05, rel=0.01)
    assert measured(1.0, *[4.0] * 5, *[1.0] * 6) == pytest.approx(1.0, rel=0.01)
    assert measured(*[4.0] * 12) == pytest.approx(4.0, rel=0.01)


def test_plain_steps_follow_the_rounds_of_their_load_only_so_far_until_they_are_seen_again() -> None:
    steps = PlainSteps(StepCosts([(1, STEP)]))
    for load in (1, 8):
        for i in range(100):
            steps.observe(load, STEP, i * STEP, i * STEP)
    for _ in range(40):
        steps.follow(8, 0.01)
    assert steps.seconds(8) == pytest.approx(1.16 * STEP, rel=0.01)
    assert steps.seconds(1) == pytest.approx(STEP)
    for _ in range(40):
        steps.follow(1, -0.01)
    assert steps.seconds(1) == pytest.approx(STEP / 1.16, rel=0.01)
    for i in range(100):
        steps.observe(8, STEP, i * STEP, i * STEP)
    steps.follow(8, 0.1)
    assert steps.seconds(8) == pytest.approx(1.105 * STEP, rel=0.01)


def test_what_was_to_be_measured_of_another_load_is_given_up() -> None:
    steps = PlainSteps(StepCosts([(1, STEP), (64, STEP)]))
    assert steps.measure_if_older(4, 1.0, 50.0, 50.0)
    assert not steps.observe(4, 3 * STEP, 51.0, 51.0)
    assert not steps.observe(3, 3 * STEP, 51.5, 51.5), "nearly as many are as good"
    assert steps.observe(32, 3 * STEP, 52.0, 52.0)
    assert not steps.measuring
    assert [steps.seconds(4), steps.seconds(32)] == pytest.approx([STEP, STEP]), "nothing is believed of either"
    assert steps.measure_if_older(32, 0.5, 52.0, 52.0), "and it may be measured at once"
