"""The engine's thread over an engine that is a script."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest

from shared.engine import loop
from shared.engine.engine import Engine, StepOutcome
from shared.engine.loop import EngineEnded, EngineLoop

TIMEOUT = 30.0


class ScriptedScheduler:
    def __init__(self) -> None:
        self.is_empty = True
        self.has_work = False
        self.num_checks = 0
        self.checked = threading.Event()
        self.broken = False

    def check(self) -> None:
        self.num_checks += 1
        self.checked.set()
        assert not self.broken, "blocks are not conserved"


class ScriptedEngine:
    """Has `work` steps to do, and notes what happens on which thread."""

    def __init__(self) -> None:
        self.scheduler = ScriptedScheduler()
        self.work = 0
        self.num_vain_steps = 0
        self.history: list[str] = []
        self.gate: threading.Event | None = None
        self.in_step = threading.Event()

    def step(self) -> StepOutcome | None:
        assert threading.current_thread().name == "engine"
        if self.work == 0:
            self.num_vain_steps += 1
            return None
        self.work -= 1
        self.scheduler.has_work = self.work > 0
        self.in_step.set()
        if self.gate is not None:
            assert self.gate.wait(TIMEOUT)
        self.history.append("step")
        return StepOutcome([], [], 1, 1, 0, 0.0)


class Bench:
    """A loop over a scripted engine, and queues on which it tells what it did."""

    def __init__(self) -> None:
        self.engine = ScriptedEngine()
        self.outcomes: queue.SimpleQueue[StepOutcome] = queue.SimpleQueue()
        self.crashed = threading.Event()
        self.on_step: Any = self.outcomes.put
        self.seconds_to_wait: Callable[[], float] = lambda: 0.0
        self.loop = EngineLoop(
            cast(Engine, self.engine),
            lambda outcome: self.on_step(outcome),
            self.crashed.set,
            lambda: self.seconds_to_wait(),
        )

    def add_work(self, steps: int, note: str = "request") -> None:
        self.engine.history.append(note)
        self.engine.work += steps


@contextmanager
def running() -> Iterator[Bench]:
    bench = Bench()
    bench.loop.start()
    try:
        yield bench
    finally:
        if bench.engine.gate is not None:
            bench.engine.gate.set()
        bench.loop.stop()


def test_a_request_wakes_the_loop_and_every_step_is_told() -> None:
    with running() as bench:
        assert bench.engine.scheduler.checked.wait(TIMEOUT)  # idle from the start
        for _ in range(2):
            bench.loop.submit(lambda: bench.add_work(3))
            for _ in range(3):
                bench.outcomes.get(timeout=TIMEOUT)
    assert bench.engine.history == ["request", "step", "step", "step"] * 2
    assert bench.outcomes.empty()
    assert not bench.crashed.is_set()


def test_requests_that_came_meanwhile_all_join_the_next_step() -> None:
    with running() as bench:
        bench.engine.gate = threading.Event()
        bench.loop.submit(lambda: bench.add_work(1, "first"))
        assert bench.engine.in_step.wait(TIMEOUT)
        for note in ("second", "third"):
            bench.loop.submit(lambda note=note: bench.add_work(1, note))  # type: ignore[misc]
        bench.engine.gate.set()
        for _ in range(3):
            bench.outcomes.get(timeout=TIMEOUT)
    assert bench.engine.history == ["first", "step", "second", "third", "step", "step"]


def test_the_outcome_is_told_before_the_next_step() -> None:
    with running() as bench:
        told = queue.SimpleQueue[None]()

        def note(outcome: StepOutcome) -> None:
            assert threading.current_thread().name == "engine"
            bench.engine.history.append("told")
            told.put(None)

        bench.on_step = note
        bench.loop.submit(lambda: bench.add_work(2))
        for _ in range(2):
            told.get(timeout=TIMEOUT)
    assert bench.engine.history == ["request", "step", "told", "step", "told"]


def test_no_step_is_tried_where_all_wait_for_their_owners() -> None:
    with running() as bench:
        assert bench.engine.scheduler.checked.wait(TIMEOUT)  # the one that finds that there is nothing at the start
        bench.engine.scheduler.is_empty = False
        for _ in range(3):
            bench.loop.submit(lambda: bench.add_work(2))
            for _ in range(2):
                bench.outcomes.get(timeout=TIMEOUT)
    assert bench.engine.num_vain_steps == 1


def test_blocks_are_checked_once_whenever_work_runs_out() -> None:
    with running() as bench:
        done = threading.Event()
        bench.loop.submit(lambda: bench.add_work(2))
        for _ in range(2):
            bench.outcomes.get(timeout=TIMEOUT)
        bench.loop.submit(done.set)  # no work: still idle, nothing to check anew
        assert done.wait(TIMEOUT)
        bench.loop.submit(lambda: bench.add_work(1))
        bench.outcomes.get(timeout=TIMEOUT)
    assert 1 <= bench.engine.scheduler.num_checks <= 3


def test_blocks_are_not_checked_while_requests_wait() -> None:
    with running() as bench:
        assert bench.engine.scheduler.checked.wait(TIMEOUT)
        left = iter(range(3))

        def go_on(outcome: StepOutcome) -> None:
            if next(left, None) is not None:
                bench.loop.submit(lambda: bench.add_work(1))
            bench.outcomes.put(outcome)

        bench.on_step = go_on
        bench.loop.submit(lambda: bench.add_work(1))
        for _ in range(4):
            bench.outcomes.get(timeout=TIMEOUT)
    assert bench.engine.scheduler.num_checks <= 2


def test_blocks_are_not_checked_in_a_pause_of_sequences_that_go_on() -> None:
    with running() as bench:
        assert bench.engine.scheduler.checked.wait(TIMEOUT)  # empty from the start
        bench.engine.scheduler.is_empty = False
        for _ in range(2):
            bench.loop.submit(lambda: bench.add_work(1))
            bench.outcomes.get(timeout=TIMEOUT)
        done = threading.Event()
        bench.loop.submit(done.set)
        assert done.wait(TIMEOUT)
    assert bench.engine.scheduler.num_checks == 1


def test_stop_ends_after_the_step_it_is_in() -> None:
    class Requests(queue.SimpleQueue[Callable[[], None] | None]):
        def put(self, item: Callable[[], None] | None, block: bool = True, timeout: float | None = None) -> None:
            super().put(item)
            if item is None:
                told_to_stop.set()

    bench = Bench()
    told_to_stop = threading.Event()
    bench.loop._requests = Requests()
    bench.engine.gate = threading.Event()
    bench.loop.start()
    bench.loop.submit(lambda: bench.add_work(100))
    assert bench.engine.in_step.wait(TIMEOUT)
    stopper = threading.Thread(target=bench.loop.stop)
    stopper.start()
    assert told_to_stop.wait(TIMEOUT)
    bench.engine.gate.set()
    stopper.join(TIMEOUT)
    assert not stopper.is_alive()
    assert bench.engine.history == ["request", "step"]
    assert bench.outcomes.qsize() == 1
    assert not bench.crashed.is_set()


async def test_an_answer_comes_from_the_engines_thread() -> None:
    with running() as bench:
        assert await bench.loop.ask(lambda: threading.current_thread().name) == "engine"
        with pytest.raises(ZeroDivisionError):
            await bench.loop.ask(lambda: 1 // 0)


async def test_nobody_waits_for_an_engine_that_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "_LOOK_SECONDS", 0.01)
    with running() as bench:
        bench.engine.gate = threading.Event()
        await bench.loop.ask(lambda: bench.add_work(1))
        assert bench.engine.in_step.wait(TIMEOUT)
        bench.loop._requests.put(None)
        asked = asyncio.create_task(bench.loop.ask(lambda: 1))
        await asyncio.sleep(0)
        bench.engine.gate.set()
        with pytest.raises(EngineEnded):
            await asked
        with pytest.raises(EngineEnded):
            await bench.loop.ask(lambda: 1)


def test_a_request_that_comes_while_a_step_waits_joins_it() -> None:
    with running() as bench:
        waiting = threading.Event()

        def until_both_are_here() -> float:
            assert threading.current_thread().name == "engine"
            if bench.engine.history != ["first"]:
                return 0.0
            waiting.set()
            return TIMEOUT

        bench.seconds_to_wait = until_both_are_here
        bench.loop.submit(lambda: bench.add_work(1, "first"))
        assert waiting.wait(TIMEOUT)
        assert bench.engine.history == ["first"], "the step has not begun"
        assert bench.loop.turn is not None, "but whoever watches sees that there is work"
        bench.loop.submit(lambda: bench.add_work(0, "second"))
        bench.outcomes.get(timeout=TIMEOUT / 2)
    assert bench.engine.history == ["first", "second", "step"]


def test_a_step_for_which_nothing_comes_begins_when_its_wait_is_over() -> None:
    with running() as bench:
        waits = [1e-3, 1e-4, 0.0, 1e-3, 0.0]
        bench.seconds_to_wait = lambda: waits.pop(0) if bench.engine.work and waits else 0.0
        bench.loop.submit(lambda: bench.add_work(2))
        for _ in range(2):
            bench.outcomes.get(timeout=TIMEOUT)
    assert bench.engine.history == ["request", "step", "step"]
    assert waits == [], "asked again after each wait, and before each step"


def test_stop_ends_a_wait() -> None:
    bench = Bench()
    waiting = threading.Event()

    def wait() -> float:
        if not bench.engine.work:
            return 0.0
        waiting.set()
        return 10 * TIMEOUT

    bench.seconds_to_wait = wait
    bench.loop.start()
    bench.loop.submit(lambda: bench.add_work(1))
    assert waiting.wait(TIMEOUT)
    bench.loop.stop()
    assert not bench.loop._thread.is_alive()
    assert bench.loop.turn is None
    assert bench.engine.history == ["request"], "nothing was computed for nobody"
    assert not bench.crashed.is_set()


def test_the_turn_is_told_while_there_is_work_and_only_then() -> None:
    with running() as bench:
        assert bench.engine.scheduler.checked.wait(TIMEOUT)
        bench.engine.gate = threading.Event()
        bench.loop.submit(lambda: bench.add_work(2))
        assert bench.engine.in_step.wait(TIMEOUT)
        first = bench.loop.turn
        assert first is not None
        assert bench.loop.turn == first
        bench.engine.in_step.clear()
        bench.engine.gate.set()
        assert bench.engine.in_step.wait(TIMEOUT)
        for _ in range(2):
            bench.outcomes.get(timeout=TIMEOUT)
    assert bench.loop.turn is None


def test_a_thread_that_hangs_can_be_looked_into_and_left_behind(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(loop, "_STOP_SECONDS", 0.01)
    with running() as bench:
        bench.engine.gate = threading.Event()
        bench.loop.submit(lambda: bench.add_work(1))
        assert bench.engine.in_step.wait(TIMEOUT)
        assert "self.gate.wait(TIMEOUT)" in bench.loop.stack()
        bench.loop.stop()
        assert "the engine's thread still runs" in caplog.text
        assert bench.loop.turn is not None


@pytest.mark.parametrize("where", ["request", "on_step", "check", "seconds_to_wait"])
def test_a_broken_invariant_ends_the_thread_and_calls_on_crash(where: str, caplog: pytest.LogCaptureFixture) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("broken")

    with running() as bench:
        if where == "request":
            bench.loop.submit(fail)
        elif where == "on_step":
            bench.on_step = fail
            bench.loop.submit(lambda: bench.add_work(2))
        elif where == "seconds_to_wait":
            assert bench.engine.scheduler.checked.wait(TIMEOUT)
            bench.seconds_to_wait = cast(Callable[[], float], fail)
            bench.loop.submit(lambda: None)
        else:
            bench.engine.scheduler.broken = True
            bench.loop.submit(lambda: bench.add_work(1))
        assert bench.crashed.wait(TIMEOUT)
    assert bench.engine.history in ([], ["request", "step"])
    (record,) = [record for record in caplog.records if record.levelno == logging.CRITICAL]
    assert "the engine's thread ended by an error" in record.message
    assert record.exc_info is not None
