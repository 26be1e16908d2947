"""What waits for a stream: order, sizes, and what is taken back."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest

from services.router.workers import outbox as outbox_module
from services.router.workers.outbox import Outbox
from shared.rpc.errors import Internal
from shared.rpc.options import MAX_MESSAGE_BYTES
from shared.worker.bundles import BUNDLE_BYTES


@dataclass(eq=False)
class Operation:
    """An operation that counts how often it is measured."""

    kind: str
    sequence_ids: tuple[int, ...]
    num_bytes: int = 1
    num_measured: int = 0

    def ByteSize(self) -> int:
        self.num_measured += 1
        return self.num_bytes


def release(sequence_id: int) -> Any:
    return Operation("release", (sequence_id,))


def new_outbox() -> Outbox[Any]:
    return Outbox(release)


def add(outbox: Outbox[Any], kind: str, *sequence_ids: int, num_bytes: int = 1) -> Operation:
    operation = Operation(kind, sequence_ids, num_bytes)
    outbox.add(operation, sequence_ids, begins=kind == "begin")
    return operation


def shown(operations: list[Any]) -> list[tuple[str, tuple[int, ...]]]:
    return [(each.kind, each.sequence_ids) for each in operations]


def test_what_was_never_sent_is_taken_back_and_needs_no_release() -> None:
    outbox = new_outbox()
    for sequence_id in range(1, 1001):
        add(outbox, "begin", sequence_id)
        add(outbox, "go on", sequence_id)
        outbox.release(sequence_id)
        assert len(outbox) == 0, "a stream that stands still gathers nothing of those that are gone"
    assert outbox.take() == []
    assert outbox._entries_of == {}


def test_what_was_sent_is_released_and_the_rest_taken_back() -> None:
    outbox = new_outbox()
    add(outbox, "begin", 1)
    assert shown(outbox.take()) == [("begin", (1,))]
    add(outbox, "go on", 1)
    add(outbox, "begin", 2)
    outbox.release(1)
    assert shown(outbox.take()) == [("begin", (2,)), ("release", (1,))]


def test_forks_are_taken_back_with_the_last_of_them() -> None:
    outbox = new_outbox()
    add(outbox, "begin", 1, 2, 3)
    add(outbox, "begin", 4)
    outbox.release(2)
    outbox.release(1)
    assert len(outbox) == 4
    outbox.release(3)
    assert shown(outbox.take()) == [("begin", (4,))]
    add(outbox, "begin", 5, 6)
    outbox.release(5)
    assert shown(outbox.take()) == [("begin", (5, 6)), ("release", (5,))]
    outbox.release(6)
    assert shown(outbox.take()) == [("release", (6,))]


def test_messages_stay_far_below_the_limit_and_nothing_is_measured_twice() -> None:
    outbox = new_outbox()
    sizes = [BUNDLE_BYTES // 3, BUNDLE_BYTES // 3, BUNDLE_BYTES // 3, 1, 9 * BUNDLE_BYTES, 5, BUNDLE_BYTES]
    operations = [add(outbox, "begin", i, num_bytes=size) for i, size in enumerate(sizes)]
    taken = []
    while bundle := outbox.take():
        taken.append([operations.index(each) for each in bundle])
    assert taken == [[0, 1, 2, 3], [4], [5], [6]]
    assert all(operation.num_measured == 1 for operation in operations)


def test_an_operation_that_no_message_could_carry_is_refused() -> None:
    outbox = new_outbox()
    with pytest.raises(Internal, match=f"{MAX_MESSAGE_BYTES} bytes"):
        add(outbox, "begin", 1, num_bytes=MAX_MESSAGE_BYTES)
    outbox.release(1)
    assert shown(outbox.take()) == [("release", (1,))]


@pytest.mark.parametrize("seed", range(20))
def test_random_traffic_means_to_the_worker_what_it_meant_to_the_router(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox_module, "BUNDLE_BYTES", 3)
    dice = random.Random(seed)
    outbox = new_outbox()
    alive: list[int] = []
    held: set[int] = set()
    ids = iter(range(1, 10_000))

    def act(operation: Operation) -> None:
        """The worker's part."""
        if operation.kind == "begin":
            held.update(operation.sequence_ids)
        elif operation.kind == "release":
            held.discard(*operation.sequence_ids)
        else:
            assert held.issuperset(operation.sequence_ids), "told of what it does not have"

    for _ in range(500):
        match dice.randrange(4):
            case 0:
                family = [next(ids) for _ in range(dice.choice([1, 1, 3]))]
                add(outbox, "begin", *family)
                alive += family
            case 1 if alive:
                add(outbox, "go on", dice.choice(alive))
            case 2 if alive:
                outbox.release(alive.pop(dice.randrange(len(alive))))
            case 3:
                for operation in outbox.take():
                    act(operation)
    while operations := outbox.take():
        for operation in operations:
            act(operation)
    assert held == set(alive)
    assert outbox._entries_of == {}
