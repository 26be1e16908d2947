from __future__ import annotations

import pytest

from shared.policy.interference import Interference


def observe(found: Interference, times_longer: float, num_times: int = 20) -> None:
    for i in range(num_times):
        found.begin(10.0 * i, 1.0)
        for step in range(4):
            found.observe(10.0 * i + step / 5, 10.0 * i + (step + 1) / 5, times_longer)


def test_that_they_share_cores_is_believed_first() -> None:
    assert Interference().slowdown == 2.0


@pytest.mark.parametrize("times_longer", [1.0, 1.5, 2.0])
def test_steps_beside_the_drafters_work_tell(times_longer: float) -> None:
    found = Interference()
    observe(found, times_longer)
    assert found.slowdown == pytest.approx(times_longer, abs=0.01)


def test_a_stall_tells_no_more_than_a_step_on_the_same_cores() -> None:
    found = Interference()
    observe(found, 1.0)
    found.begin(1000.0, 1.0)
    found.observe(1000.0, 1001.0, 100.0)
    assert found.slowdown == pytest.approx(1.2, abs=0.01)


def test_a_step_that_seems_short_tells_no_more_than_one_without_it() -> None:
    found = Interference()
    observe(found, 0.01)
    assert found.slowdown == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize(("began", "ended"), [(99.9, 100.5), (100.5, 101.1), (101.2, 101.6), (98.0, 99.0)])
def test_steps_that_are_not_wholly_beside_it_say_nothing(began: float, ended: float) -> None:
    found = Interference()
    found.begin(100.0, 1.0)
    found.observe(began, ended, 1.0)
    assert found.slowdown == 2.0


def test_work_begins_behind_what_the_drafter_is_still_at() -> None:
    found = Interference()
    found.begin(100.0, 1.0)
    assert found.over_at == 102.0
    found.begin(100.5, 1.25)
    assert found.over_at == 104.5
    found.observe(101.0, 102.5, 1.0)
    assert found.slowdown == 2.0
    found.observe(102.0, 103.0, 1.0)
    assert found.slowdown == pytest.approx(1.8)


def test_it_goes_on_as_long_as_is_said() -> None:
    found = Interference()
    found.go_on(5.0)
    found.go_on(4.0)
    assert found.over_at == 5.0
