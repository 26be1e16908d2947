"""What `make bench-router` makes of CPU time."""

from __future__ import annotations

import os
import time

import pytest

from tests.benchmarks.cpu_time import cpu_seconds
from tests.benchmarks.errors import BenchmarkError
from tests.benchmarks.router import Taken, costs_of


def test_what_does_not_grow_with_the_output_is_the_requests_own() -> None:
    # 2 ms a request, 100 µs a token, 2.5 tokens a round.
    short = Taken(4 * 0.002 + 64 * 1e-4, requests=4, tokens=64, rounds=24)
    long = Taken(4 * 0.002 + 576 * 1e-4, requests=4, tokens=576, rounds=224)
    costs = costs_of(short, long)
    assert (costs.request, costs.token, costs.round) == pytest.approx((0.002, 1e-4, 512 * 1e-4 / 200))
    assert costs_of(short + short, long + long) == costs
    assert costs_of(Taken(0.1, 1, 16), Taken(0.2, 1, 144)).round is None


def test_too_little_is_no_measurement() -> None:
    with pytest.raises(BenchmarkError, match="more loads"):
        costs_of(Taken(0.01, 1, 16), Taken(0.01, 1, 144))
    with pytest.raises(BenchmarkError, match="less than nothing"):
        costs_of(Taken(0.01, 12, 192), Taken(0.2, 12, 1728))


def test_cpu_time_is_that_of_the_process() -> None:
    before, own = cpu_seconds(os.getpid()), time.process_time()
    while time.process_time() - own < 0.1:
        pass
    assert cpu_seconds(os.getpid()) - before == pytest.approx(time.process_time() - own, abs=0.05)
