from __future__ import annotations

import pytest

from shared.policy.utilisation import Utilisation


def test_the_share_is_that_of_the_time_with_prompts_forgetting_what_is_long_ago() -> None:
    found = Utilisation(0.0)
    for i in range(1, 1000):
        found.observe(i % 4 == 0, 0.1 * i)
    assert found.share == pytest.approx(0.25, abs=0.03)
    for i in range(1000, 1200):
        found.observe(True, 0.1 * i)
    assert found.share > 0.97


def test_a_pause_between_two_loads_is_no_time_with_prompts() -> None:
    found = Utilisation(0.0)
    found.observe(True, 3600.0)
    assert found.share < 0.1
    assert found.delay(1.0) == pytest.approx(1.1, abs=0.05)
