"""When an engine's thread counts as hanging: by the turns of its loop, and by ticks of the loop that asks."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import count

import pytest

from shared.worker import watchdog
from shared.worker.watchdog import StepWatchdog, step_limit


def first_true(guard: StepWatchdog, most: int = 1000) -> int | None:
    """Which tick (from 1) says that it hangs."""
    return next((tick for tick in range(1, most + 1) if guard.tick()), None)


def test_one_and_the_same_turn_hangs_when_the_limit_is_over() -> None:
    assert first_true(StepWatchdog(lambda: 7, 60.0)) == 61


def test_a_loop_that_waits_for_work_never_hangs() -> None:
    assert first_true(StepWatchdog(lambda: None, 2.0)) is None


def test_slow_turns_do_not_add_up() -> None:
    turns: Iterator[int] = (turn for turn in count() for _ in range(60))
    assert first_true(StepWatchdog(lambda: next(turns), 60.0)) is None


def test_a_pause_between_turns_begins_anew() -> None:
    turns = iter([*[5] * 40, None, *[5] * 100])
    assert first_true(StepWatchdog(lambda: next(turns), 60.0)) == 40 + 1 + 61


async def test_a_process_that_stood_still_itself_finds_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock leaps by an hour at every look, as for a process that was stopped: only ticks count."""
    monkeypatch.setattr(watchdog, "_TICK_SECONDS", 0.001)
    loop, leaps = asyncio.get_running_loop(), count(step=3600)
    monkeypatch.setattr(loop, "time", lambda: float(next(leaps)))
    looks = iter([3, 3, 3, 4])
    ended = asyncio.Event()

    def turn() -> int | None:
        found = next(looks, None)
        if found is None:
            ended.set()
        return found

    waiting = asyncio.create_task(StepWatchdog(turn, 60.0).wait())
    await ended.wait()
    assert not waiting.done()
    waiting.cancel()


def test_the_limit_follows_what_a_full_step_should_cost() -> None:
    assert step_limit([], 512) == 60
    assert step_limit([(1, 0.01), (128, 0.05)], 512) == 60
    # 1 s for 128 tokens, 4 s for 512: a hundred times that.
    assert step_limit([(1, 0.5), (128, 1.0)], 512) == 400
    assert step_limit([(1, 0.5), (128, 1.0)], 64) == 100
