"""A circuit breaker through its states, by a clock that the test sets."""

from __future__ import annotations

import random

from services.router.workers.breaker import CircuitBreaker


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def opened() -> tuple[CircuitBreaker, Clock]:
    clock = Clock()
    breaker = CircuitBreaker(clock)
    for _ in range(3):
        assert not breaker.begin()
        breaker.failed()
    return breaker, clock


def test_it_opens_at_the_third_failure_in_a_row() -> None:
    breaker = CircuitBreaker(Clock())
    for outcome in (breaker.failed, breaker.failed, breaker.succeeded, breaker.failed, breaker.failed):
        outcome()
        assert breaker.allows
    breaker.failed()
    assert not breaker.allows


def test_half_open_it_lets_one_probe_through_at_a_time() -> None:
    breaker, clock = opened()
    clock.now += 0.99
    assert not breaker.allows
    clock.now += 0.01
    assert breaker.allows
    assert breaker.begin()
    assert not breaker.allows
    assert not breaker.begin(), "placed for want of another worker, and no probe"
    clock.now += 1000
    assert not breaker.allows, "the probe is still out"
    breaker.abandon_probe()
    assert breaker.allows
    assert breaker.begin()
    breaker.succeeded()
    assert breaker.allows
    assert not breaker.begin()


def test_each_failed_probe_doubles_the_wait_up_to_half_a_minute() -> None:
    breaker, clock = opened()
    waits = []
    for _ in range(8):
        began = clock.now
        while not breaker.allows:
            clock.now += 0.5
        waits.append(clock.now - began)
        breaker.begin()
        breaker.failed()
    assert waits == [1, 2, 4, 8, 16, 30, 30, 30]
    clock.now += 30
    breaker.begin()
    breaker.succeeded()
    for _ in range(3):
        breaker.failed()
    clock.now += 1
    assert breaker.allows, "a success takes the wait back"


def test_failures_of_what_was_there_before_do_not_lengthen_the_wait() -> None:
    breaker, clock = opened()
    for _ in range(20):
        breaker.failed()
    clock.now += 1
    assert breaker.allows


def test_tripped_it_is_open_at_once() -> None:
    clock = Clock()
    breaker = CircuitBreaker(clock)
    breaker.trip()
    assert not breaker.allows
    clock.now += 1
    assert breaker.allows


def test_whatever_happens_a_worker_is_tried_again_within_half_a_minute() -> None:
    """As long as probes end."""
    dice, clock = random.Random(0), Clock()
    breaker = CircuitBreaker(clock)
    for _ in range(2000):
        probe = breaker.begin() if breaker.allows else False
        happens = [breaker.failed, breaker.succeeded, breaker.trip]
        dice.choice([*happens, breaker.abandon_probe] if probe else happens)()
        clock.now += dice.uniform(0, 5)
        if not breaker.allows:
            now = clock.now
            clock.now += 30
            assert breaker.allows
            clock.now = now
