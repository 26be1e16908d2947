"""What each router is told of the others' sequences on this worker."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TypeAlias

from outrider.v1 import target_pb2, worker_pb2

from shared.worker.stream import Lane, RouterStream

Stream: TypeAlias = RouterStream[target_pb2.TargetResponse]

# A router that has nothing here is told no more often: what it would do with it, placing, is rarer than steps are.
_TOLD_EVERY_SECONDS = 0.05


class Neighbours:
    """Routers that share a worker: γ and placement of each count what all of them have there.

    Belongs to the engine's thread.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # When each was told last.
        self._told: dict[Stream, float] = {}

    @property
    def alone(self) -> bool:
        """Whether there is nobody to tell of another."""
        return len(self._told) < 2

    def begin(self, stream: Stream) -> None:
        """One more router is there."""
        self._told[stream] = self._clock()

    def end(self, stream: Stream) -> None:
        """It is gone, and its sequences with it."""
        self._told.pop(stream, None)

    def loads(
        self, lanes: Collection[Lane[target_pb2.TargetResponse]], kv_usage: float
    ) -> Mapping[Stream, worker_pb2.OtherLoad]:
        """What the others have, for each router; `lanes`: of all."""
        own = {stream: [0, 0, 0] for stream in self._told}
        for lane in lanes:
            counts = own.get(lane.stream)
            if counts is None:
                continue
            sequence = lane.sequence
            counts[0] += lane.answered
            if not lane.answered:
                counts[1] += 1
                counts[2] += max(0, len(sequence.token_ids) - sequence.num_computed_tokens)
        totals = [sum(counts) for counts in zip(*own.values(), strict=True)]
        return {
            stream: worker_pb2.OtherLoad(
                num_decoding=totals[0] - counts[0],
                num_waiting=totals[1] - counts[1],
                num_prefill_tokens=totals[2] - counts[2],
                kv_usage=kv_usage,
            )
            for stream, counts in own.items()
        }

    def due(self, told: Collection[Stream]) -> Iterator[Stream]:
        """Those to be told by themselves now: not `told` with their step, and not for some time."""
        now = self._clock()
        for stream, last in self._told.items():
            if stream in told:
                self._told[stream] = now
            elif now - last >= _TOLD_EVERY_SECONDS:
                self._told[stream] = now
                yield stream
