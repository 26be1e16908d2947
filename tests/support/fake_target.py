"""A target worker with no model, whose steps go wrong when and how a test says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import grpc
from outrider.v1 import inference_pb2, target_pb2, target_pb2_grpc, worker_pb2

from tests.support.fake_workers import Worker, key_of, next_token, worker_info

STEP_SECONDS = 0.01


class Fault(Enum):
    """What goes wrong in a target's step."""

    ABORT_BEFORE = auto()  # the stream breaks, the step's results unsent
    ABORT_AFTER = auto()  # the stream breaks behind them
    UNKNOWN = auto()
    FAILED = auto()
    SHIFTED = auto()  # results without their first token, at a position that the router has not reached


@dataclass(eq=False)
class TargetSequence:
    token_ids: list[int]
    num_prompt_tokens: int
    params: worker_pb2.SequenceParams
    num_steps: int
    draft: list[int] = field(default_factory=list)
    # The row that each token of it follows.
    rows: list[int] = field(default_factory=list)


@dataclass(eq=False)
class TargetStream:
    context: Any
    sequences: dict[int, TargetSequence] = field(default_factory=dict)
    pulls: set[int] = field(default_factory=set)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    write_lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def send(self, response: target_pb2.TargetResponse) -> None:
        async with self.write_lock:
            await self.context.write(response)


class FakeTarget(Worker, target_pb2_grpc.TargetServicer):
    """`faults` says by number of the step (from 0, `num_steps` so far) what goes wrong in it; with `gate`
    cleared, no step is taken; with `num_own_drafts` it drafts so many itself where it has no proposal. `exports` and
    `withdrawn` are tickets, `pulls` what it was asked to fetch."""

    def __init__(self, tokenizer_fingerprint: str, role: worker_pb2.Role = worker_pb2.ROLE_BOTH) -> None:
        super().__init__(worker_info("fake-target", tokenizer_fingerprint, STEP_SECONDS))
        self.info.role = role
        self.exports: list[bytes] = []
        self.withdrawn: list[bytes] = []
        self.pulls: list[target_pb2.Pull] = []
        self.faults: dict[int, Fault] = {}
        self.num_own_drafts = 0
        self.every_step: Fault | None = None
        self.num_steps = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.prefills: list[target_pb2.Prefill] = []
        self.streams: set[TargetStream] = set()

    @property
    def num_sequences(self) -> int:
        return sum(len(stream.sequences) for stream in self.streams)

    @property
    def num_pulls(self) -> int:
        """Those not released."""
        return sum(len(stream.pulls) for stream in self.streams)

    async def announce_drain(self) -> None:
        for stream in self.streams:
            await stream.send(target_pb2.TargetResponse(draining=True))

    def _register(self, server: grpc.aio.Server) -> None:
        target_pb2_grpc.add_TargetServicer_to_server(self, server)

    async def Serve(self, request_iterator: AsyncIterator[target_pb2.TargetRequest], context: Any) -> None:  # type: ignore[override]
        stream = TargetStream(context)
        self.streams.add(stream)
        reader = asyncio.create_task(self._read(request_iterator, stream))
        try:
            while not reader.done():
                if any(sequence.num_steps > 0 for sequence in stream.sequences.values()):
                    await self.gate.wait()
                    await self._step(stream)
                else:
                    await stream.changed.wait()
                    stream.changed.clear()
        finally:
            self.streams.discard(stream)
            reader.cancel()
            with suppress(asyncio.CancelledError):
                await reader

    async def _read(self, requests: AsyncIterator[target_pb2.TargetRequest], stream: TargetStream) -> None:
        try:
            async for request in requests:
                for operation in request.operations:
                    match operation.WhichOneof("operation"):
                        case "prefill":
                            self._prefill(stream, operation.prefill)
                        case "verify":
                            await self._verify(stream, operation.verify)
                        case "release":
                            stream.sequences.pop(operation.release, None)
                            stream.pulls.discard(operation.release)
                        case "export":
                            self.exports.append(operation.export.ticket)
                        case "withdraw":
                            self.withdrawn.append(operation.withdraw)
                        case "pull":
                            await self._pull(stream, operation.pull)
                stream.changed.set()
        finally:
            stream.changed.set()

    async def _pull(self, stream: TargetStream, pull: target_pb2.Pull) -> None:
        self.pulls.append(pull)
        stream.pulls.add(pull.pull_id)
        result = target_pb2.PullResult(pull_id=pull.pull_id, num_tokens=len(pull.token_ids), engine="none")
        await stream.send(target_pb2.TargetResponse(pulls=[result]))

    def _prefill(self, stream: TargetStream, prefill: target_pb2.Prefill) -> None:
        self.prefills.append(prefill)
        prefills_only = self.info.role == worker_pb2.ROLE_PREFILL
        self._expect(prefill.num_steps == 1 or not prefills_only, "more than a first token of a prefill worker")
        self._expect(not prefill.pull_id or prefill.pull_id in stream.pulls, "prefill behind an unknown pull")
        self._expect(len(prefill.token_ids) >= prefill.num_prompt_tokens > 0, "prefill without its prompt")
        self._expect(prefill.num_steps > 0, "prefill that asks for nothing")
        branches = [(prefill.sequence_id, prefill.params.sequence_index)]
        branches += [(fork.sequence_id, fork.sequence_index) for fork in prefill.forks]
        for sequence_id, sequence_index in branches:
            self._expect(sequence_id not in stream.sequences, f"sequence {sequence_id} twice")
            params = worker_pb2.SequenceParams()
            params.CopyFrom(prefill.params)
            params.sequence_index = sequence_index
            stream.sequences[sequence_id] = TargetSequence(
                list(prefill.token_ids), prefill.num_prompt_tokens, params, prefill.num_steps
            )

    async def _verify(self, stream: TargetStream, verify: target_pb2.Verify) -> None:
        self._expect(self.info.role != worker_pb2.ROLE_PREFILL, "a round on a prefill worker")
        if not self._goes_on(stream, verify):
            stream.sequences.pop(verify.sequence_id, None)
            await stream.send(_refusal(verify.sequence_id, target_pb2.STEP_STATUS_UNKNOWN_SEQUENCE))

    def _goes_on(self, stream: TargetStream, verify: target_pb2.Verify) -> bool:
        sequence = stream.sequences.get(verify.sequence_id)
        if sequence is None:
            return False
        draft = list(verify.proposal.token_ids)
        if draft:
            self._expect(sequence.num_steps == 0, "a proposal while steps are left")
            if verify.position != len(sequence.token_ids):
                return False
        elif verify.position > len(sequence.token_ids):
            return False
        sequence.draft, sequence.rows = draft, list(verify.proposal.parents) or list(range(len(draft)))
        sequence.num_steps += verify.num_steps
        return True

    async def _step(self, stream: TargetStream) -> None:
        fault = self.faults.pop(self.num_steps, self.every_step)
        self.num_steps += 1
        if fault is Fault.ABORT_BEFORE:
            await stream.context.abort(grpc.StatusCode.UNAVAILABLE, "scripted")
        running = {id: each for id, each in stream.sequences.items() if each.num_steps > 0}
        response = target_pb2.TargetResponse(
            stats=worker_pb2.StepStats(
                seconds=STEP_SECONDS,
                num_tokens=sum(1 + len(each.draft) for each in running.values()),
                num_sequences=len(running),
                num_running=len(stream.sequences),
            )
        )
        for sequence_id, sequence in running.items():
            if fault in (Fault.UNKNOWN, Fault.FAILED):
                failed, unknown = target_pb2.STEP_STATUS_FAILED, target_pb2.STEP_STATUS_UNKNOWN_SEQUENCE
                response.results.add(sequence_id=sequence_id, status=failed if fault is Fault.FAILED else unknown)
                del stream.sequences[sequence_id]
                continue
            result = response.results.add()
            result.CopyFrom(_advance(sequence_id, sequence, self.num_own_drafts))
            if fault is Fault.SHIFTED:
                result.position += 1
                del result.token_ids[0]
            if result.status != target_pb2.STEP_STATUS_RUNNING:
                del stream.sequences[sequence_id]
        await stream.send(response)
        if fault is Fault.ABORT_AFTER:
            await stream.context.abort(grpc.StatusCode.UNAVAILABLE, "scripted")


def _advance(sequence_id: int, sequence: TargetSequence, num_own_drafts: int) -> target_pb2.StepResult:
    """One step of one sequence: the draft tokens that are the target's own, and one token more."""
    position, draft, params = len(sequence.token_ids), sequence.draft, sequence.params
    own: list[int] = []
    if not draft:
        for _ in range(num_own_drafts):
            own.append(next_token([*sequence.token_ids, *own], key_of(params)))
        draft, sequence.rows = own, list(range(len(own)))
    following = {(row, token): i for i, (row, token) in enumerate(zip(sequence.rows, draft, strict=True), 1)}
    sequence.draft = []
    sequence.num_steps -= 1
    status = target_pb2.STEP_STATUS_RUNNING
    num_accepted = row = 0
    while status == target_pb2.STEP_STATUS_RUNNING:
        token = next_token(sequence.token_ids, key_of(params))
        sequence.token_ids.append(token)
        if token in params.stop_token_ids:
            status = target_pb2.STEP_STATUS_STOPPED
        elif len(sequence.token_ids) - sequence.num_prompt_tokens == params.max_tokens:
            status = target_pb2.STEP_STATUS_LENGTH
        if (row, token) not in following:
            break
        row = following[row, token]
        num_accepted += 1
    return target_pb2.StepResult(
        self_drafted=worker_pb2.Proposal(token_ids=own, sources=[inference_pb2.DRAFT_SOURCE_TARGET] * len(own))
        if own
        else None,
        sequence_id=sequence_id,
        position=position,
        status=status,
        token_ids=sequence.token_ids[position:],
        num_draft_tokens=len(draft),
        num_accepted=num_accepted,
    )


def _refusal(sequence_id: int, status: target_pb2.StepStatus) -> target_pb2.TargetResponse:
    return target_pb2.TargetResponse(results=[target_pb2.StepResult(sequence_id=sequence_id, status=status)])
