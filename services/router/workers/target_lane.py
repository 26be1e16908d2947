"""One sequence's place on a target worker: what is asked for there, and its results."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from outrider.v1 import target_pb2, worker_pb2

if TYPE_CHECKING:
    from services.router.workers.target_link import TargetLink


class WorkerLost(Exception):
    """The worker does not have the sequence any more; prefill its committed tokens on another.

    `drained`: because it ended in order.
    """

    def __init__(self, reason: str, drained: bool = False) -> None:
        super().__init__(reason)
        self.drained = drained


@dataclass(frozen=True, slots=True)
class LaneResult:
    """A sequence's result and when it came (`time.monotonic`).

    `prefill_seconds`: what prompts had added by then to the worker's steps, all together (see
    `StepCosts.seconds_of_prompts`).
    """

    result: target_pb2.StepResult
    received: float
    prefill_seconds: float

    def seconds_since(self, last: LaneResult) -> float:
        """From that result to this one, without what prompts added in between."""
        return self.received - last.received - (self.prefill_seconds - last.prefill_seconds)

    def mostly_prompts(self, last: LaneResult) -> bool:
        """Whether what prompts added was more than that."""
        return self.prefill_seconds - last.prefill_seconds > self.seconds_since(last)


@dataclass(eq=False)
class TargetLane:
    """One sequence's place on a target worker.

    `num_steps` counts the results still to come by themselves: those asked for and not yet received (by the
    sequence: `num_owed`, by the link). `probe`: the sequence is to show whether a worker that failed is back.
    """

    link: TargetLink
    sequence_id: int
    num_steps: int
    # Tokens to compute before its first result (0 for a fork, which shares them), hashes of the full blocks that others
    # will find behind it, as far as they are known, and whether that result is to come.
    num_prefill_tokens: int
    block_hashes: Sequence[bytes] = ()
    waiting: bool = True
    probe: bool = False
    # What it waits for to begin with, if anything.
    pull_id: int = 0
    num_owed: int = field(init=False)
    num_received: int = 0
    _results: asyncio.Queue[LaneResult | None] = field(default_factory=asyncio.Queue)
    # Whether the worker was going when it said the latest.
    _drained: bool = False

    def __post_init__(self) -> None:
        self.num_owed = self.num_steps

    async def next(self) -> LaneResult:
        """The next result. Raises WorkerLost if the worker went, forgot the sequence, or failed at it."""
        found = await self._results.get()
        if found is None:
            raise WorkerLost("its stream ended", self._drained)
        self.num_steps -= 1
        return found

    def verify(self, position: int, proposal: worker_pb2.Proposal | None, num_steps: int, traceparent: str) -> None:
        """Asks for a round (or with no proposal for plain decoding) and allows `num_steps` more steps."""
        self.num_steps += num_steps
        self.num_owed += num_steps
        verify = target_pb2.Verify(
            sequence_id=self.sequence_id,
            position=position,
            proposal=proposal,
            num_steps=num_steps,
            traceparent=traceparent,
        )
        self.link.send(target_pb2.TargetOperation(verify=verify), [self.sequence_id])

    def release(self) -> None:
        """Gives the place up; nothing more is received. Safe to call again."""
        self.link.release(self.sequence_id)

    def receive(self, entry: LaneResult | None) -> None:
        """Takes the next result in; None: there will be none."""
        self._drained = self.link.draining
        self._results.put_nowait(entry)
