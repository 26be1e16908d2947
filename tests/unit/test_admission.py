"""Admission: bounds, turns, and every way out of the line."""

from __future__ import annotations

import asyncio
import random

import pytest

from services.router.clients.admission import Admission
from shared.rpc.errors import DeadlineExceeded, ResourceExhausted, Unavailable


class _Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class _Request:
    """A request that runs until `finish()`."""

    def __init__(self, admission: Admission, connection_id: str, log: list[str] | None = None, weight: int = 1) -> None:
        self.running = asyncio.Event()
        self._may_end = asyncio.Event()
        self.task = asyncio.create_task(self._run(admission, connection_id, log, weight))

    async def _run(self, admission: Admission, connection_id: str, log: list[str] | None, weight: int) -> None:
        async with admission.slot(connection_id, None, weight):
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


async def _started(admission: Admission, line: str, weight: int = 1) -> _Request:
    request = _Request(admission, line, weight=weight)
    await _settle()
    return request


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


async def _enter(admission: Admission, connection_id: str, timeout_seconds: float | None, weight: int = 1) -> None:
    async with admission.slot(connection_id, timeout_seconds, weight):
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


async def test_a_request_takes_as_many_places_as_it_weighs() -> None:
    admission = Admission(4, 10)
    heavy, light, heavy_too = [await _started(admission, "a", weight) for weight in (3, 1, 2)]
    assert [request.running.is_set() for request in (heavy, light, heavy_too)] == [True, True, False]
    assert (admission.num_running, admission.num_waiting) == (4, 1)
    await light.finish()
    await _settle()
    assert not heavy_too.running.is_set()
    await heavy.finish()
    await heavy_too.running.wait()
    assert admission.num_running == 2
    await heavy_too.finish()
    assert admission.num_running == 0


async def test_a_request_that_weighs_more_than_there_is_runs_alone() -> None:
    admission = Admission(4, 10)
    light, heavy, behind = [await _started(admission, line, weight) for line, weight in (("a", 1), ("b", 16), ("b", 1))]
    assert (admission.num_running, admission.num_waiting) == (1, 2)
    await light.finish()
    await heavy.running.wait()
    assert (admission.num_running, admission.num_waiting) == (4, 1)
    await heavy.finish()
    await behind.running.wait()
    await behind.finish()
    assert admission.num_running == 0


async def test_light_requests_do_not_pass_a_heavy_one_for_ever() -> None:
    admission = Admission(2, 100)
    running = [await _started(admission, "light") for _ in range(2)]
    heavy = await _started(admission, "heavy", 2)
    waiting = [await _started(admission, "light") for _ in range(50)]
    num_passed = 0
    while not heavy.running.is_set():
        await running.pop(0).finish()
        await _settle()
        admitted = [request for request in waiting if request.running.is_set()]
        num_passed += len(admitted)
        running += admitted
        waiting = [request for request in waiting if request not in admitted]
    assert num_passed <= 2, "as many as weigh what it does"
    for request in (heavy, *running, *waiting):
        request._may_end.set()
    await asyncio.gather(heavy.task, *(request.task for request in (*running, *waiting)))
    assert admission.num_running == 0


async def test_lines_are_served_by_weight() -> None:
    """One line's requests weigh 4, the other's 1: of places given while both wait, each gets half."""
    admission = Admission(4, 200)
    first = await _started(admission, "x", 4)
    log: list[str] = []
    heavy = [_Request(admission, "heavy", log, 4) for _ in range(10)]
    light = [_Request(admission, "light", log) for _ in range(80)]
    await _settle()
    for request in (*heavy, *light):
        request._may_end.set()
    await first.finish()
    await asyncio.gather(*(request.task for request in (*heavy, *light)))
    until_heavy_is_through = log[: max(index for index, line in enumerate(log) if line == "heavy") + 1]
    assert until_heavy_is_through.count("heavy") == 10
    assert 36 <= until_heavy_is_through.count("light") <= 44


async def test_when_the_one_all_wait_behind_leaves_the_next_is_let_in() -> None:
    for how in ("cancelled", "too late"):
        admission = Admission(2, 10)
        running = await _started(admission, "a")
        heavy = asyncio.create_task(_enter(admission, "b", 0.01 if how == "too late" else None, 2))
        await _settle()
        light = await _started(admission, "c")
        if how == "cancelled":
            assert not light.running.is_set()
            heavy.cancel()
        with pytest.raises(asyncio.CancelledError if how == "cancelled" else DeadlineExceeded):
            await heavy
        async with asyncio.timeout(10):
            await light.running.wait()
        await light.finish()
        await running.finish()
        assert (admission.num_running, admission.num_waiting) == (0, 0)


async def test_places_given_back_early_are_given_back_once() -> None:
    admission = Admission(3, 5)
    async with admission.slot("a", None, 3) as release:
        waiting = await _started(admission, "b", 2)
        release()
        await waiting.running.wait()
        release()
        assert admission.num_running == 2
    assert admission.num_running == 2
    await waiting.finish()
    assert admission.num_running == 0


@pytest.mark.parametrize("seed", range(4))
async def test_places_are_conserved_under_random_use(seed: int) -> None:
    rng = random.Random(seed)
    admission = Admission(6, 8)
    inside: dict[object, int] = {}
    most_inside = 0

    async def request(line: str, weight: int, num_steps: int) -> None:
        nonlocal most_inside
        async with admission.slot(line, rng.choice([None, None, 0.0, 5.0]), weight) as release:
            me = object()
            inside[me] = min(weight, 6)
            most_inside = max(most_inside, sum(inside.values()))
            assert sum(inside.values()) <= admission.num_running <= 6
            try:
                for _ in range(num_steps):
                    await asyncio.sleep(0)
            finally:
                del inside[me]
            if num_steps % 2:
                release()
                await asyncio.sleep(0)

    tasks = []
    for _ in range(2000):
        weight = rng.choice([1, 1, 1, 2, 3, 6, 16])
        tasks.append(asyncio.create_task(request(rng.choice("abcd"), weight, rng.randint(0, 5))))
        if rng.random() < 0.4:
            rng.choice(tasks[-10:]).cancel()
        if rng.random() < 0.7:
            await asyncio.sleep(0)
        assert admission.num_running <= 6
    results = await asyncio.gather(*tasks, return_exceptions=True)
    outcomes = {type(result) for result in results}
    assert outcomes == {type(None), asyncio.CancelledError, ResourceExhausted, DeadlineExceeded}
    assert most_inside == 6
    assert (len(inside), admission.num_running, admission.num_waiting) == (0, 0, 0)
    # And no place is lost: what fits alone still does.
    await asyncio.wait_for(_enter(admission, "a", None, 6), 10)


@pytest.mark.parametrize(("max_running", "max_waiting", "name"), [(0, 1, "max_running"), (1, -1, "max_waiting")])
def test_bounds_that_make_no_sense(max_running: int, max_waiting: int, name: str) -> None:
    with pytest.raises(ValueError, match=name):
        Admission(max_running, max_waiting)
