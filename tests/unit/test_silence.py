"""A worker's silence against what its steps should take."""

from __future__ import annotations

import pytest

from services.router.workers.silence import Silence

TICK = 0.5


def silent_for(seconds: float) -> Silence:
    silence = Silence()
    for _ in range(round(seconds / TICK)):
        silence.tick(TICK, owed=True)
    return silence


@pytest.mark.parametrize(
    ("step_seconds", "overdue", "hung", "sole"),
    [
        # Quick steps: the floors.
        (0.01, 3, 8, 60),
        # 20 s for a step (a long prefill on a CPU): 4, 8 and 16 of them.
        (20, 80, 160, 320),
    ],
)
def test_limits_follow_what_a_step_should_take(step_seconds: float, overdue: float, hung: float, sole: float) -> None:
    assert not silent_for(overdue).overdue(step_seconds)
    assert silent_for(overdue + TICK).overdue(step_seconds)
    assert not silent_for(hung).hung(step_seconds, sole=False)
    assert silent_for(hung + TICK).hung(step_seconds, sole=False)
    assert not silent_for(sole).hung(step_seconds, sole=True)
    assert silent_for(sole + TICK).hung(step_seconds, sole=True)


def test_any_word_ends_it() -> None:
    silence = silent_for(10)
    silence.heard()
    assert not silence.overdue(0.01)
    silence.tick(TICK, owed=True)
    assert silence.seconds == TICK


def test_a_worker_that_owes_nothing_is_not_silent() -> None:
    silence = silent_for(10)
    silence.tick(TICK, owed=False)
    assert silence.seconds == 0
    for _ in range(100):
        silence.tick(TICK, owed=False)
    silence.tick(TICK, owed=True)
    assert silence.seconds == TICK
