"""What a worker is still to be told: operations in order, and taken back with the sequence they are for."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from google.protobuf.message import Message

from shared.rpc.errors import Internal
from shared.rpc.options import MAX_MESSAGE_BYTES
from shared.worker.bundles import BUNDLE_BYTES

Operation = TypeVar("Operation", bound=Message)

# It fits into a message whatever else is in there.
_MAX_OPERATION_BYTES: Final = MAX_MESSAGE_BYTES - BUNDLE_BYTES


@dataclass(eq=False, slots=True)
class _Entry(Generic[Operation]):
    """An operation, and which of its sequences are still wanted. `releases` follow it: those that are not, begun
    by it all the same."""

    operation: Operation
    num_bytes: int
    begins: bool
    wanted: set[int]
    releases: list[Operation] = field(default_factory=list)


class Outbox(Generic[Operation]):
    """Operations that wait for the stream to be written to.

    A sequence that is released takes back what was not sent of it; one that the worker never heard of costs it
    nothing. So however long the stream stands still, what waits belongs to sequences that are alive, and to
    those that were when it stopped.
    """

    def __init__(self, release: Callable[[int], Operation]) -> None:
        """`release` makes the operation that ends a sequence."""
        self._release = release
        self._entries: OrderedDict[_Entry[Operation], None] = OrderedDict()
        self._entries_of: dict[int, list[_Entry[Operation]]] = {}

    def __len__(self) -> int:
        return sum(1 + len(entry.releases) for entry in self._entries)

    def add(self, operation: Operation, sequence_ids: Sequence[int], *, begins: bool) -> None:
        """Adds an operation for these sequences; `begins` says that the worker learns of them by it.

        Raises Internal if no message could carry it.
        """
        num_bytes = operation.ByteSize()
        if num_bytes > _MAX_OPERATION_BYTES:
            raise Internal(f"{num_bytes} bytes for a worker about one sequence: at most {_MAX_OPERATION_BYTES} can be")
        entry = _Entry(operation, num_bytes, begins, set(sequence_ids))
        self._entries[entry] = None
        for sequence_id in sequence_ids:
            self._entries_of.setdefault(sequence_id, []).append(entry)

    def release(self, sequence_id: int) -> None:
        """Takes back what is here of a sequence, and has the worker release it if it has begun it, or will."""
        begun = True
        for entry in self._entries_of.pop(sequence_id, ()):
            entry.wanted.discard(sequence_id)
            if not entry.wanted:
                del self._entries[entry]
            elif entry.begins:
                release = self._release(sequence_id)
                entry.releases.append(release)
                entry.num_bytes += release.ByteSize()
            begun = begun and not entry.begins
        if begun:
            self.add(self._release(sequence_id), [], begins=False)

    def take(self) -> list[Operation]:
        """Removes and returns the next operations, as many as should share a message; empty if there are none."""
        operations: list[Operation] = []
        num_bytes = 0
        while self._entries:
            entry = next(iter(self._entries))
            if operations and num_bytes + entry.num_bytes > BUNDLE_BYTES:
                break
            del self._entries[entry]
            for sequence_id in entry.wanted:
                left = self._entries_of[sequence_id]
                left.remove(entry)
                if not left:
                    del self._entries_of[sequence_id]
            operations += [entry.operation, *entry.releases]
            num_bytes += entry.num_bytes
        return operations

    def clear(self) -> None:
        self._entries.clear()
        self._entries_of.clear()
