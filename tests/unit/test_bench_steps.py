"""What `make bench-steps` makes of its turns."""

from __future__ import annotations

import itertools
from typing import cast

import pytest

from tests.benchmarks import steps
from tests.benchmarks.errors import BenchmarkError
from tests.benchmarks.steps import Measured, Size, by_speed

_SLOW, _FAST = Measured(35e9, 0.0165, 0.0150, 1.10), Measured(60e9, 0.0105, 0.0088, 1.19)


def test_a_steady_memory_has_one_line() -> None:
    turns = [_SLOW._replace(rate=rate, ratio=ratio) for rate, ratio in ((33e9, 1.05), (35e9, 1.2), (40e9, 1.1))]
    assert by_speed(turns) == [_SLOW]


def test_steps_beside_another_memory_are_told_apart() -> None:
    assert by_speed([_FAST, _SLOW, _SLOW, _FAST, _SLOW, _FAST, _FAST]) == [_SLOW, _FAST]
    assert by_speed([_FAST, _SLOW, _SLOW, _SLOW, _FAST]) == [_SLOW]
    assert by_speed([_FAST, _SLOW, _FAST]) == [_FAST]


def test_what_was_slow_once_does_not_hide_the_others() -> None:
    stalled = Measured(10e9, 0.06, 0.055, 1.1)
    assert by_speed([stalled, *[_SLOW] * 3, *[_FAST] * 3]) == [_SLOW, _FAST]


def test_what_wanders_is_of_one_speed() -> None:
    wandering = [_SLOW._replace(rate=rate * 1e9) for rate in (33, 34, 36, 37, 38, 39, 40, 42)]
    assert by_speed(wandering) == [_SLOW._replace(rate=37.5e9)]


class Model:
    """Whose steps take no time."""

    def run(self, size: Size) -> None:
        """Nothing."""

    def num_bytes(self, size: Size) -> int:
        return 1

    def num_flops(self, size: Size) -> int:
        return 1


def test_steps_at_whose_two_ends_memory_had_another_speed_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = itertools.cycle([35e9, 60e9, 36e9, 36e9])
    monkeypatch.setattr(steps, "bandwidth", lambda _: next(rates))
    monkeypatch.setattr(steps, "peak_flops", lambda: 1.0)
    monkeypatch.setattr(steps, "_STREAMED_BYTES", 4096)
    [found] = steps.measure(cast(steps.Model, Model()), Size(1, 1, 1), 5)
    assert (found.rate, found.floor) == (36e9, 1.0)
    rates = itertools.cycle([35e9, 60e9])
    with pytest.raises(BenchmarkError, match="faster or slower"):
        steps.measure(cast(steps.Model, Model()), Size(1, 1, 1), 5)
