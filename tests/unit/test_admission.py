"""Admission: bounds, turns, and every way out of the line."""

from __future__ import annotations

import asyncio
import random

import pytest

from services.router.admission import Admission
from shared.rpc.errors import DeadlineExceeded, ResourceExhausted, Unavailable


class _Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class _Request:
    """A request that runs until `finish()`."""

    def __init__(self, admission: Admission, connection_id: str, log: list[str] | None = None) -> None:
        self.running = asyncio.Event()
        self._may_end = asyncio.Event()
        self.task = asyncio.create_task(self._run(admission, connection_id, log))

    async def _run(self, admission: Admission, connection_id: str, log: list[str] | None) -> None:
        async with admission.slot(connection_id, None):
            if log is not None:
                log.append(connection_id)
            self.running.set()
            await self._may_end.wait()

    async def finish(self) -> None:
        self._may_end.set()
        await self.task


async def _settle() -> None:
    """Lets every task run until it waits for something."""
    for _ in range(10):
        await asyncio.sleep(0)


async def _start(admission: Admission, *connections: str, log: list[str] | None = None) -> list[_Request]:
    requests = []
    for connection in connections:
        requests.append(_Request(admission, connection, log))
        await _settle()
    return requests


async def test_at_most_max_running_run() -> None:
    admission = Admission(2, 2)
    a, b, c, d = await _start(admission, "x", "x", "x", "x")
    assert [r.running.is_set() for r in (a, b, c, d)] == [True, True, False, False]
    assert (admission.num_running, admission.num_waiting) == (2, 2)
    await a.finish()
    await _settle()
    assert [r.running.is_set() for r in (c, d)] == [True, False]
    for request in (b, c):
        await request.finish()
    await d.running.wait()
    await d.finish()
    assert (admission.num_running, admission.num_waiting) == (0, 0)


async def test_connections_are_served_in_turn() -> None:
    admission = Admission(1, 10)
    log: list[str] = []
    requests = await _start(admission, "first", "a", "a", "a", "a", "b", "c", "c", log=log)
    for request in requests:
        request._may_end.set()
    await asyncio.gather(*(request.task for request in requests))
    assert log == ["first", "a", "b", "c", "a", "c", "a", "a"]


async def test_a_newcomer_does_not_pass_those_waiting() -> None:
    admission = Admission(1, 10)
    log: list[str] = []
    running, waiting = await _start(admission, "a", "b", log=log)
    # Between the end of one and the start of the next.
    running._may_end.set()
    (newcomer,) = await _start(admission, "c", log=log)
    await waiting.finish()
    await newcomer.finish()
    assert log == ["a", "b", "c"]


async def test_a_full_line_refuses_at_once_and_says_when_to_come_again() -> None:
    clock = _Clock()
    admission = Admission(2, 3, clock)
    requests = await _start(admission, "x", "x", "x", "x", "x")
    with pytest.raises(ResourceExhausted, match="2 of 2 sequences running and 3 of 3 requests waiting") as caught:
        await _enter(admission, "x", None)
    # No request has ended yet.
    assert caught.value.retry_after_seconds == 1.0
    clock.now = 8.0
    await requests[0].finish()
    clock.now = 12.0
    await requests[1].finish()
    requests += await _start(admission, "x", "x")
    with pytest.raises(ResourceExhausted) as caught:
        await _enter(admission, "x", None)
    # Service took 8 and 12 seconds, so a line of three before two places takes 10 * 3 / 2.
    assert caught.value.retry_after_seconds == pytest.approx(15.0)
    for request in requests:
        await request.finish()
    assert admission.num_running == 0


async def _enter(admission: Admission, connection_id: str, timeout_seconds: float | None) -> None:
    async with admission.slot(connection_id, timeout_seconds):
        pass


async def test_a_flood_does_not_shut_others_out() -> None:
    """In a full line the last of the longest gives way, until those waiting are even."""
    admission = Admission(1, 4)
    log: list[str] = []
    flood = await _start(admission, "flood", "flood", "flood", "flood", "flood", log=log)
    others = await _start(admission, "other", "other", log=log)
    for turned_away in (flood[-1], flood[-2]):
        with pytest.raises(ResourceExhausted):
            await turned_away.task
    assert admission.num_waiting == 4
    for connection_id in ("flood", "other"):
        with pytest.raises(ResourceExhausted):
            await _enter(admission, connection_id, None)
    for request in (*flood[:3], *others):
        request._may_end.set()
    await asyncio.gather(*(request.task for request in (*flood[:3], *others)))
    assert log == ["flood", "flood", "other", "flood", "other"]
    assert admission.num_running == 0


async def test_nobody_gives_way_where_that_would_only_turn_the_tables() -> None:
    admission = Admission(1, 3)
    requests = await _start(admission, "x", "a", "a", "b")
    with pytest.raises(ResourceExhausted):
        await _enter(admission, "b", None)
    for request in requests:
        request._may_end.set()
    await asyncio.gather(*(request.task for request in requests))


async def test_without_a_line_what_cannot_run_is_refused() -> None:
    admission = Admission(1, 0)
    (running,) = await _start(admission, "a")
    with pytest.raises(ResourceExhausted):
        await _enter(admission, "b", None)
    await running.finish()
    await _enter(admission, "b", None)


async def test_a_turn_that_does_not_come_in_time() -> None:
    admission = Admission(1, 5)
    (running,) = await _start(admission, "a")
    with pytest.raises(DeadlineExceeded):
        await _enter(admission, "b", 0.0)
    assert admission.num_waiting == 0
    await running.finish()
    # A free place needs no time.
    await _enter(admission, "b", 0.0)
    assert admission.num_running == 0


async def test_cancelled_while_waiting() -> None:
    admission = Admission(1, 5)
    running, gone, stays = await _start(admission, "a", "b", "b")
    gone.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone.task
    assert admission.num_waiting == 1
    await running.finish()
    await stays.running.wait()
    await stays.finish()
    assert admission.num_running == 0


async def test_cancelled_in_the_moment_a_place_is_freed() -> None:
    """Both orders of cancelling the one waiting and ending the one running, within one step of the loop."""
    for cancel_first in (True, False):
        admission = Admission(1, 5)
        slot = admission.slot("a", None)
        await slot.__aenter__()
        gone, stays = await _start(admission, "b", "c")
        if cancel_first:
            gone.task.cancel()
        await slot.__aexit__(None, None, None)
        if not cancel_first:
            gone.task.cancel()
        await stays.running.wait()
        assert gone.task.cancelled()
        assert not gone.running.is_set()
        await stays.finish()
        assert (admission.num_running, admission.num_waiting) == (0, 0)


async def test_a_failing_request_frees_its_place() -> None:
    admission = Admission(1, 0)
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            async with admission.slot("a", None):
                raise ZeroDivisionError
    assert admission.num_running == 0


async def test_drain_refuses_the_line_and_waits_for_those_running() -> None:
    admission = Admission(1, 5)
    running, waiting = await _start(admission, "a", "b")
    draining = asyncio.create_task(admission.drain())
    with pytest.raises(Unavailable):
        await waiting.task
    with pytest.raises(Unavailable):
        await _enter(admission, "c", None)
    assert not draining.done()
    await running.finish()
    await draining
    assert admission.num_running == 0


async def test_drain_when_idle() -> None:
    admission = Admission(1, 0)
    await admission.drain()
    with pytest.raises(Unavailable):
        await _enter(admission, "a", None)


async def test_places_are_conserved_under_random_use() -> None:
    rng = random.Random(0)
    admission = Admission(3, 8)
    num_inside = 0
    most_inside = 0

    async def request(connection_id: str, num_steps: int) -> None:
        nonlocal num_inside, most_inside
        async with admission.slot(connection_id, None):
            num_inside += 1
            most_inside = max(most_inside, num_inside)
            try:
                for _ in range(num_steps):
                    await asyncio.sleep(0)
            finally:
                num_inside -= 1

    tasks = []
    for _ in range(2000):
        tasks.append(asyncio.create_task(request(rng.choice("abcd"), rng.randint(0, 5))))
        if rng.random() < 0.4:
            rng.choice(tasks[-10:]).cancel()
        if rng.random() < 0.7:
            await asyncio.sleep(0)
        assert admission.num_running <= 3
    results = await asyncio.gather(*tasks, return_exceptions=True)
    outcomes = {type(result) for result in results}
    assert outcomes == {type(None), asyncio.CancelledError, ResourceExhausted}
    assert most_inside == 3
    assert (num_inside, admission.num_running, admission.num_waiting) == (0, 0, 0)


@pytest.mark.parametrize(("max_running", "max_waiting", "name"), [(0, 1, "max_running"), (1, -1, "max_waiting")])
def test_bounds_that_make_no_sense(max_running: int, max_waiting: int, name: str) -> None:
    with pytest.raises(ValueError, match=name):
        Admission(max_running, max_waiting)
