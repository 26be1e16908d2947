"""The router's end of a target worker's stream: lanes for sequences, results to whom they belong."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from typing import Final

import grpc
from outrider.v1 import target_pb2, target_pb2_grpc, worker_pb2

from services.router.workers.backlog import Backlog
from services.router.workers.breaker import CircuitBreaker
from services.router.workers.connection import INFO_TIMEOUT_SECONDS, WorkerConnection
from services.router.workers.silence import Silence
from services.router.workers.target_lane import LaneResult, TargetLane
from shared.policy.pace import steps_ahead
from shared.policy.placement import Role
from shared.sampling.params import SamplingParams
from shared.security.identity import PLAIN, Identity
from shared.worker.messages import params_to_proto

logger = logging.getLogger(__name__)

_ROLES: Final[dict[int, Role]] = {worker_pb2.ROLE_PREFILL: "prefill", worker_pb2.ROLE_DECODE: "decode"}
# Results of a sequence after which its worker counts as doing its work, if it has not ended before.
_PROVEN_RESULTS = 8


class TargetLink(WorkerConnection[target_pb2.TargetOperation, target_pb2.TargetRequest, target_pb2.TargetResponse]):
    """A target worker as the router sees it.

    `breaker` counts the requests that it failed, over all its connections.
    """

    service = "target"

    def __init__(
        self,
        address: str,
        check: Callable[[worker_pb2.WorkerInfo], None],
        changed: asyncio.Condition,
        identity: Identity = PLAIN,
    ) -> None:
        super().__init__(address, check, changed, identity)
        self.draining = False
        self.backlog = Backlog()
        # Sequences that will come when their prompt is computed elsewhere.
        self.num_incoming = 0
        # Those on their way from here to other workers, for it is going.
        self.num_leaving = 0
        self.breaker = CircuitBreaker()
        self._silence = Silence()
        self._notifying: asyncio.Task[None] | None = None
        self._lanes: dict[int, TargetLane] = {}
        self._sequence_ids = itertools.count(1)
        # What came of pulls is told to who asked for them.
        self._pulls: dict[int, Callable[[target_pb2.PullResult], None]] = {}
        self._stats = worker_pb2.StepStats()
        # What other routers have there, as it was told last.
        self._others = worker_pb2.OtherLoad()
        self._prefill_seconds = 0.0

    @property
    def role(self) -> Role:
        """Its part in the deployment; "both" before it is known."""
        return _ROLES.get(self.info.role, "both") if self.info is not None else "both"

    @property
    def decodes(self) -> bool:
        return self.role != "prefill"

    @property
    def num_decoding(self) -> int:
        """Sequences that have their first token, other routers' as well."""
        return len(self._lanes) - self.backlog.num_sequences + self._others.num_decoding

    @property
    def num_waiting(self) -> int:
        """Those that have not, other routers' as well."""
        return self.backlog.num_sequences + self._others.num_waiting

    @property
    def num_ahead(self) -> int:
        """Plain steps that a sequence is granted at a time."""
        return steps_ahead(self.costs.seconds(max(1, self.num_decoding)))

    @property
    def backlog_tokens(self) -> int:
        """What those have still to compute."""
        return self.backlog.num_tokens + self._others.num_prefill_tokens

    @property
    def kv_usage(self) -> float:
        """Share of its KV blocks that sequences own, 0 to 1, as it was told last."""
        return self._stats.kv_usage if self._lanes else self._others.kv_usage

    @property
    def num_lanes(self) -> int:
        return len(self._lanes)

    @property
    def usable(self) -> bool:
        return self.connected and not self.draining

    @property
    def state(self) -> str:
        if not self.connected:
            return "away"
        if self.draining:
            return "draining"
        return "serving" if self.breaker.allows and not self.overdue else "failing"

    @property
    def overdue(self) -> bool:
        """Whether it owes results for longer than its steps take."""
        return self._silence.overdue(self._step_seconds)

    def fits(self, num_tokens: int) -> bool:
        """Whether a sequence of that many tokens, prompt and output together, has room there."""
        info = self.info
        return info is not None and num_tokens <= min(info.max_context, info.num_blocks * info.block_size)

    def tick(self, seconds: float) -> None:
        """So much time has passed."""
        self._silence.tick(seconds, any(lane.num_owed > 0 for lane in self._lanes.values()))

    def hung(self, sole: bool) -> bool:
        """Whether it is silent for so long that it is to be given up; `sole`: there is no other."""
        return self._silence.hung(self._step_seconds, sole)

    def give_up(self) -> None:
        """Takes its sequences from a worker that hangs: should it wake, it finds its stream ended, and drops them."""
        logger.warning("worker hangs", extra={"address": self.address, "silent_seconds": self._silence.seconds})
        self.breaker.trip()
        self.hang_up()

    @property
    def stats(self) -> worker_pb2.StepStats:
        """Of its latest step. An idle worker reports none: what it said last is over."""
        return self._stats if self._lanes else worker_pb2.StepStats()

    def prefill(
        self,
        token_ids: Sequence[int],
        num_prompt_tokens: int,
        params: Sequence[SamplingParams],
        num_steps: int,
        cache_salt: bytes,
        traceparent: str,
        pull_id: int = 0,
        *,
        only_user: bool = False,
        num_held: int = 0,
        block_hashes: Sequence[bytes] = (),
    ) -> list[TargetLane]:
        """Begins a sequence for each of `params`, all on the same tokens, computed once; with the KV of that pull.

        `only_user`: no others begin with it, so that it is dropped when these have. `num_held`: leading tokens that
        are there without being computed for this; `block_hashes`: of the full blocks that who comes next will find, as
        far as they are known.
        """
        num_new = max(1, len(token_ids) - num_held)
        first = TargetLane(self, next(self._sequence_ids), num_steps, num_new, block_hashes)
        forks = [TargetLane(self, next(self._sequence_ids), num_steps, 0) for _ in params[1:]]
        lanes = [first, *forks]
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
            pull_id=pull_id,
        )
        sequence_ids = [lane.sequence_id for lane in lanes]
        self.send(target_pb2.TargetOperation(prefill=prefill), sequence_ids, begins=True)
        first.probe = self.breaker.begin()
        if only_user:
            first.pull_id = pull_id
        for lane in lanes:
            self.backlog.add(lane)
        self._lanes.update((lane.sequence_id, lane) for lane in lanes)
        return lanes

    def export(self, lane: TargetLane, ticket: bytes) -> None:
        """Has the KV of a sequence held for whoever comes with the ticket, also when the sequence is released next."""
        export = target_pb2.Export(sequence_id=lane.sequence_id, ticket=ticket)
        self.send(target_pb2.TargetOperation(export=export), [])

    def withdraw(self, ticket: bytes) -> None:
        """Nobody will come with it."""
        if self.connected:
            self.send(target_pb2.TargetOperation(withdraw=ticket), [])

    def pull(
        self,
        address: str | None,
        ticket: bytes,
        token_ids: Sequence[int],
        cache_salt: bytes,
        traceparent: str,
        pulled: Callable[[target_pb2.PullResult], None],
    ) -> int:
        """Has it fetch KV of these tokens from the worker at `address`: what is exported under the ticket, or cached
        there. None: from the prefix store.

        Returns the pull's id, which `drop_pull` is to be called with. `pulled` is told what came of it, unless it is
        dropped or the worker lost before.
        """
        pull_id = next(self._sequence_ids)
        pull = target_pb2.Pull(
            pull_id=pull_id,
            address=address or "",
            ticket=ticket,
            token_ids=token_ids,
            cache_salt=cache_salt,
            traceparent=traceparent,
            from_store=address is None,
        )
        self.send(target_pb2.TargetOperation(pull=pull), [pull_id], begins=True)
        self._pulls[pull_id] = pulled
        return pull_id

    def drop_pull(self, pull_id: int) -> None:
        """No further sequence begins with it. Safe to call again."""
        if self.connected and self._pulls.pop(pull_id, None) is not None:
            self.send_release(pull_id)

    def release(self, sequence_id: int) -> None:
        lane = self._lanes.get(sequence_id)
        if lane is not None:
            self._drop(lane)
            if self.connected:
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
        self._silence.heard()
        if response.draining:
            self.draining = True
            self._notifying = asyncio.create_task(self._notify())
        if response.HasField("stats"):
            stats = self._stats = response.stats
            if response.results:
                self.costs.observe(stats.num_tokens, stats.seconds)
            self._prefill_seconds += self.costs.seconds_of_prompts(
                stats.num_tokens, stats.num_prefill_tokens, self.num_decoding, stats.seconds
            )
            self.backlog.computed(stats.num_own_prefill_tokens)
        if response.HasField("others"):
            self._others = response.others
        for pull in response.pulls:
            if (pulled := self._pulls.get(pull.pull_id)) is not None:
                pulled(pull)
        now = time.monotonic()
        for result in response.results:
            lane = self._lanes.get(result.sequence_id)
            if lane is not None:
                self._on_result(lane, LaneResult(result, now, self._prefill_seconds))

    def _on_result(self, lane: TargetLane, entry: LaneResult) -> None:
        status = entry.result.status
        self._end_waiting(lane)
        lane.num_owed -= 1
        lane.num_received += 1
        ended = status in (target_pb2.STEP_STATUS_STOPPED, target_pb2.STEP_STATUS_LENGTH)
        num_results = _PROVEN_RESULTS if self.decodes else 1
        if ended or (status == target_pb2.STEP_STATUS_RUNNING and lane.num_received == num_results):
            self.breaker.succeeded()
            lane.probe = False
        if status != target_pb2.STEP_STATUS_RUNNING:
            self._drop(lane)
        lane.receive(entry)

    def _on_lost(self) -> None:
        for lane in list(self._lanes.values()):
            self._drop(lane)
            lane.receive(None)
        self._pulls.clear()
        self.draining = False
        self._silence.heard()
        self._stats = worker_pb2.StepStats()
        self._others = worker_pb2.OtherLoad()

    def _end_waiting(self, lane: TargetLane) -> None:
        """Its first result is here, or it is given up. Safe to call again."""
        if lane.waiting:
            lane.waiting = False
            self.drop_pull(lane.pull_id)
            self.backlog.remove(lane)

    def _drop(self, lane: TargetLane) -> None:
        del self._lanes[lane.sequence_id]
        self._end_waiting(lane)
        if lane.probe:
            self.breaker.abandon_probe()

    @property
    def _step_seconds(self) -> float:
        """What the longest step should take: a full one, which others' prefills may make of any."""
        num_tokens = self.info.max_batch_tokens if self.info is not None else 1
        return max(self.costs.seconds(num_tokens), self._stats.seconds)
