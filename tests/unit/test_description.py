"""What no worker says of itself is refused, and said why."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from outrider.v1 import worker_pb2

from services.router.workers.description import check_description
from tests.support.fake_workers import worker_info

Info = worker_pb2.WorkerInfo


def sound() -> Info:
    return worker_info("m", "t", 0.01)


def with_costs(*costs: tuple[int, float]) -> Callable[[Info], None]:
    def change(info: Info) -> None:
        del info.step_costs[:]
        info.step_costs.extend(worker_pb2.StepCost(num_tokens=size, seconds=seconds) for size, seconds in costs)

    return change


def test_what_a_worker_says_is_taken() -> None:
    check_description(sound())


@pytest.mark.parametrize("field", ["vocab_size", "max_context", "block_size", "num_blocks", "max_batch_tokens"])
def test_nothing_that_is_counted_is_zero(field: str) -> None:
    info = sound()
    info.ClearField(field)
    with pytest.raises(ValueError, match=f"its {field} is 0, not at least 1"):
        check_description(info)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (with_costs(), "its step_costs are none"),
        (with_costs((0, 0.1)), "0 tokens behind 0, not more"),
        (with_costs((4, 0.1), (4, 0.2)), "4 tokens behind 4, not more"),
        (with_costs((1, 0.0)), "0.0 s for 1 tokens, not more than 0"),
        (with_costs((1, 0.1), (2, -1.0)), "-1.0 s for 2 tokens"),
        (with_costs((1, math.nan)), "nan s for 1 tokens"),
        (with_costs((1, math.inf)), "inf s for 1 tokens"),
    ],
)
def test_steps_cost_something_and_are_in_order(change: Callable[[Info], None], complaint: str) -> None:
    info = sound()
    change(info)
    with pytest.raises(ValueError, match=complaint):
        check_description(info)
