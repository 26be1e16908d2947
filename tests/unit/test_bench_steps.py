"""What `make bench-steps` makes of its turns."""

from __future__ import annotations

from tests.benchmarks.steps import Measured, by_speed

_SLOW, _FAST = Measured(35e9, 0.0165, 0.0150, 1.10), Measured(60e9, 0.0105, 0.0088, 1.19)


def test_a_steady_memory_has_one_line() -> None:
    turns = [_SLOW._replace(rate=rate, ratio=ratio) for rate, ratio in ((33e9, 1.05), (35e9, 1.2), (40e9, 1.1))]
    assert by_speed(turns) == [_SLOW]


def test_steps_beside_another_memory_are_told_apart() -> None:
    assert by_speed([_FAST, _SLOW, _SLOW, _FAST, _SLOW, _FAST, _FAST]) == [_SLOW, _FAST]
    assert by_speed([_FAST, _SLOW, _SLOW, _SLOW, _FAST]) == [_SLOW]
    assert by_speed([_FAST, _SLOW, _FAST]) == [_FAST]
