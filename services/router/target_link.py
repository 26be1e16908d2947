"""The router's end of a target worker's stream: lanes for sequences, results to whom they belong."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import grpc
from outrider.v1 import target_pb2, target_pb2_grpc, worker_pb2

from services.router.connection import INFO_TIMEOUT_SECONDS, WorkerConnection
from services.router.placement import WorkerLoad
from shared.sampling.params import SamplingParams
from shared.worker.messages import params_to_proto


class WorkerLost(Exception):
    """The worker does not have the sequence any more; prefill its committed tokens on another."""


@dataclass(frozen=True, slots=True)
class LaneResult:
    """A sequence's result, what the step it came from cost the worker, and when it came (`time.monotonic`)."""

    result: target_pb2.StepResult
    stats: worker_pb2.StepStats
    received: float


@dataclass(eq=False)
class TargetLane:
    """One sequence's place on a target worker.

    `num_steps` counts the results still to come by themselves: those asked for and not yet received.
    """

    link: TargetLink
    sequence_id: int
    num_steps: int
    # Tokens it waits to have computed before its first result; 0 once that is here.
    num_prefill_tokens: int
    _results: asyncio.Queue[LaneResult | None] = field(default_factory=asyncio.Queue)

    async def next(self) -> LaneResult:
        """The next result. Raises WorkerLost if the worker went, forgot the sequence, or failed at it."""
        found = await self._results.get()
        if found is None:
            raise WorkerLost(self.link.address)
        self.num_steps -= 1
        return found

    def verify(self, position: int, proposal: worker_pb2.Proposal | None, num_steps: int, traceparent: str) -> None:
        """Asks for a round (or with no proposal for plain decoding) and allows `num_steps` more steps."""
        self.num_steps += num_steps
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

    def _receive(self, entry: LaneResult | None) -> None:
        self._results.put_nowait(entry)


@dataclass(slots=True)
class Backlog:
    """Sequences whose first result is still to come, and the tokens they were sent with."""

    num_sequences: int = 0
    num_tokens: int = 0


class TargetLink(WorkerConnection[target_pb2.TargetOperation, target_pb2.TargetRequest, target_pb2.TargetResponse]):
    """A target worker as the router sees it."""

    def __init__(
        self, address: str, check: Callable[[worker_pb2.WorkerInfo], None], changed: asyncio.Condition
    ) -> None:
        super().__init__(address, check, changed)
        self.draining = False
        self.backlog = Backlog()
        self._lanes: dict[int, TargetLane] = {}
        self._sequence_ids = itertools.count(1)
        self._stats = worker_pb2.StepStats()

    @property
    def num_lanes(self) -> int:
        return len(self._lanes)

    @property
    def usable(self) -> bool:
        return self.connected and not self.draining

    def load(self) -> WorkerLoad:
        return WorkerLoad(
            instance_id=self.info.instance_id if self.info is not None else self.address,
            num_running=max(0, len(self._lanes) - self._stats.num_waiting),
            num_waiting=self._stats.num_waiting,
            # An idle worker reports no steps: what it said last is over.
            kv_usage=self._stats.kv_usage if self._lanes else 0.0,
            alive=self.usable,
        )

    def prefill(
        self,
        token_ids: Sequence[int],
        num_prompt_tokens: int,
        params: Sequence[SamplingParams],
        num_steps: int,
        cache_salt: bytes,
        traceparent: str,
    ) -> list[TargetLane]:
        """Begins a sequence for each of `params`, all on the same tokens, computed once."""
        lanes = [TargetLane(self, next(self._sequence_ids), num_steps, 0) for _ in params]
        self._begin_waiting(lanes[0], len(token_ids))
        first, *forks = lanes
        prefill = target_pb2.Prefill(
            sequence_id=first.sequence_id,
            token_ids=token_ids,
            num_prompt_tokens=num_prompt_tokens,
            params=params_to_proto(params[0]),
            forks=[
                target_pb2.Fork(sequence_id=fork.sequence_id, sequence_index=each.sequence_index)
                for fork, each in zip(forks, params[1:], strict=True)
            ],
            num_steps=num_steps,
            cache_salt=cache_salt,
            traceparent=traceparent,
        )
        sequence_ids = [lane.sequence_id for lane in lanes]
        self.send(target_pb2.TargetOperation(prefill=prefill), sequence_ids, begins=True)
        self._lanes.update((lane.sequence_id, lane) for lane in lanes)
        return lanes

    def release(self, sequence_id: int) -> None:
        lane = self._lanes.pop(sequence_id, None)
        if lane is not None:
            self._end_waiting(lane)
        if lane is not None and self.connected:
            self.send_release(sequence_id)

    def _new_request(self, operations: Sequence[target_pb2.TargetOperation]) -> target_pb2.TargetRequest:
        return target_pb2.TargetRequest(operations=operations)

    def _release_operation(self, sequence_id: int) -> target_pb2.TargetOperation:
        return target_pb2.TargetOperation(release=sequence_id)

    async def _get_info(self, channel: grpc.aio.Channel) -> worker_pb2.WorkerInfo:
        stub = target_pb2_grpc.TargetStub(channel)
        return await stub.GetWorkerInfo(worker_pb2.GetWorkerInfoRequest(), timeout=INFO_TIMEOUT_SECONDS)

    def _open(self, channel: grpc.aio.Channel) -> object:
        return target_pb2_grpc.TargetStub(channel).Serve()

    def _on_response(self, response: target_pb2.TargetResponse) -> None:
        if response.draining:
            self.draining = True
        if response.HasField("stats"):
            self._stats = response.stats
            self.costs.observe(response.stats.num_tokens, response.stats.seconds)
        now = time.monotonic()
        for result in response.results:
            lane = self._lanes.get(result.sequence_id)
            if lane is not None:
                self._end_waiting(lane)
                lane._receive(LaneResult(result, response.stats, now))
                if result.status != target_pb2.STEP_STATUS_RUNNING:
                    del self._lanes[result.sequence_id]

    def _on_lost(self) -> None:
        lanes, self._lanes = self._lanes, {}
        self.backlog = Backlog()
        for lane in lanes.values():
            lane._receive(None)
        self.draining = False
        self._stats = worker_pb2.StepStats()

    def _begin_waiting(self, lane: TargetLane, num_tokens: int) -> None:
        lane.num_prefill_tokens = num_tokens
        self.backlog.num_sequences += 1
        self.backlog.num_tokens += num_tokens

    def _end_waiting(self, lane: TargetLane) -> None:
        """Its first result is here, or it is given up. Safe to call again."""
        if lane.num_prefill_tokens:
            self.backlog.num_sequences -= 1
            self.backlog.num_tokens -= lane.num_prefill_tokens
            lane.num_prefill_tokens = 0
