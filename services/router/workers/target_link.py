"""The router's end of a target worker's stream: lanes for sequences, results to whom they belong."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Final

import grpc
from outrider.v1 import target_pb2, target_pb2_grpc, worker_pb2

from services.router.workers.breaker import CircuitBreaker
from services.router.workers.connection import INFO_TIMEOUT_SECONDS, WorkerConnection
from services.router.workers.silence import Silence
from shared.policy.pace import steps_ahead
from shared.policy.placement import Role
from shared.sampling.params import SamplingParams
from shared.security.identity import PLAIN, Identity
from shared.worker.messages import params_to_proto

logger = logging.getLogger(__name__)

_ROLES: Final[dict[int, Role]] = {worker_pb2.ROLE_PREFILL: "prefill", worker_pb2.ROLE_DECODE: "decode"}
# Results of a sequence after which its worker counts as doing its work, if it has not ended before.
_PROVEN_RESULTS = 8


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

    def _receive(self, entry: LaneResult | None) -> None:
        self._drained = self.link.draining
        self._results.put_nowait(entry)


@dataclass(slots=True)
class Backlog:
    """Sequences whose first result is still to come: what they have still to compute, in tokens, and full blocks that
    will be there then, by their hashes, each as often as it was sent."""

    num_tokens: int = 0
    block_hashes: Counter[bytes] = field(default_factory=Counter)

    # Tokens that each has still to compute, in the order in which they were sent, which is that of the worker.
    _num_left: dict[TargetLane, int] = field(default_factory=dict)

    @property
    def num_sequences(self) -> int:
        return len(self._num_left)

    def depth(self, block_hashes: Sequence[bytes]) -> int:
        """Leading blocks of these that will be there."""
        return sum(1 for _ in takewhile(self.block_hashes.__contains__, block_hashes))

    def add(self, lane: TargetLane) -> None:
        self._num_left[lane] = lane.num_prefill_tokens
        self.num_tokens += lane.num_prefill_tokens
        self.block_hashes.update(lane.block_hashes)

    def computed(self, num_tokens: int) -> None:
        """The worker computed so many tokens of our prompts in a step: of those that came first. Its last token each
        keeps until it has its first result."""
        for lane, num_left in self._num_left.items():
            if not num_tokens:
                break
            num_computed = min(num_tokens, max(0, num_left - 1))
            self._num_left[lane] -= num_computed
            self.num_tokens -= num_computed
            num_tokens -= num_computed

    def remove(self, lane: TargetLane) -> None:
        self.num_tokens -= self._num_left.pop(lane)
        for block_hash in lane.block_hashes:
            self.block_hashes[block_hash] -= 1
            if not self.block_hashes[block_hash]:
                del self.block_hashes[block_hash]


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
        lane._receive(entry)

    def _on_lost(self) -> None:
        for lane in list(self._lanes.values()):
            self._drop(lane)
            lane._receive(None)
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
