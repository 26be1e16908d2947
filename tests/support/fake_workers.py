"""Target and draft workers with no model: real gRPC servers, a next token that is a function of those before it.

They hold the router to the protocol (`violations`), and fail when and how a test says.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import grpc
from outrider.v1 import draft_pb2, draft_pb2_grpc, inference_pb2, target_pb2, target_pb2_grpc, worker_pb2

from shared.rpc.options import SERVER_OPTIONS

VOCAB_SIZE = 257
NUM_TEXT_IDS = 94  # ids 1 to 94 are printable ASCII in tests.support.models.byte_tokenizer
STEP_SECONDS = 0.01
DRAFT_SECONDS = 0.0005


def key_of(params: worker_pb2.SequenceParams) -> int:
    """What the tokens depend on besides those before them: nothing if greedy, else seed and index."""
    return 0 if params.temperature == 0 else 1 + params.seed + params.sequence_index


def next_token(token_ids: Sequence[int], key: int = 0) -> int:
    """The target's next token; it depends on every token before it and on how many there are."""
    return 1 + _state(token_ids, key) % NUM_TEXT_IDS


def draft_token(token_ids: Sequence[int], key: int = 0) -> int:
    """The drafter's: the target's own, but for about one in four."""
    right = next_token(token_ids, key)
    return right if _state(token_ids, key) // NUM_TEXT_IDS % 4 else right % NUM_TEXT_IDS + 1


def draft_tokens(token_ids: Sequence[int], count: int, key: int = 0) -> list[int]:
    tokens = list(token_ids)
    for _ in range(count):
        tokens.append(draft_token(tokens, key))
    return tokens[len(token_ids) :]


def tree_tokens(
    token_ids: Sequence[int], num_draft_tokens: int, num_nodes: int, key: int = 0
) -> tuple[list[int], list[int]]:
    """The drafter's tree and the row that each of its tokens follows: its own token and the target's at each depth, as
    long as there is room, and behind them more that are neither."""
    tokens, found, rows, row = list(token_ids), [], [], 0
    for _ in range(num_draft_tokens):
        right = next_token(tokens, key)
        for token in dict.fromkeys((draft_token(tokens, key), right)):
            found.append(token)
            rows.append(row)
        tokens.append(right)
        row = len(found)
    while len(found) < num_nodes:
        found.append(NUM_TEXT_IDS + len(found))
        rows.append(0)
    return found[:num_nodes], rows[:num_nodes]


def plain_output(prompt_ids: Sequence[int], max_tokens: int, key: int = 0) -> list[int]:
    """What the target alone makes of a prompt."""
    tokens = list(prompt_ids)
    for _ in range(max_tokens):
        tokens.append(next_token(tokens, key))
    return tokens[len(prompt_ids) :]


def _state(token_ids: Sequence[int], key: int) -> int:
    state = 7 + 101 * key
    for token in token_ids:
        state = (state * 31 + token + 1) % 65521
    return state


class Fault(Enum):
    """What goes wrong in a target's step."""

    ABORT_BEFORE = auto()  # the stream breaks, the step's results unsent
    ABORT_AFTER = auto()  # the stream breaks behind them
    UNKNOWN = auto()
    FAILED = auto()
    SHIFTED = auto()  # results without their first token, at a position that the router has not reached


class Answer(Enum):
    """What a drafter does with a Propose."""

    PROPOSE = auto()
    HANG = auto()
    UNKNOWN = auto()
    EXHAUSTED = auto()
    CONTEXT_EXCEEDED = auto()
    GARBAGE = auto()  # ids that are none, more of them than asked for
    EMPTY = auto()
    LATE = auto()  # a proposal for another position first
    ABORT = auto()


_REFUSALS = {
    Answer.EXHAUSTED: draft_pb2.DRAFT_STATUS_EXHAUSTED,
    Answer.CONTEXT_EXCEEDED: draft_pb2.DRAFT_STATUS_CONTEXT_EXCEEDED,
}


class Worker:
    """A server on a port of its own, that can be stopped and started again."""

    def __init__(self, info: worker_pb2.WorkerInfo) -> None:
        self.info = info
        self.port = 0
        self.num_starts = 0
        self.num_described = 0
        self.violations: list[str] = []
        self._server: grpc.aio.Server | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        self.num_starts += 1
        self.info.instance_id = f"{id(self):x}-{self.num_starts}"
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        self._register(self._server)
        self.port = self._server.add_insecure_port(self.address)
        await self._server.start()

    async def stop(self) -> None:
        """Dies: streams break off, sequences are gone."""
        if self._server is not None:
            await self._server.stop(None)
            self._server = None

    @property
    def num_sequences(self) -> int:
        raise NotImplementedError

    def _register(self, server: grpc.aio.Server) -> None:
        raise NotImplementedError

    async def GetWorkerInfo(self, request: worker_pb2.GetWorkerInfoRequest, context: Any) -> worker_pb2.WorkerInfo:
        self.num_described += 1
        return self.info

    async def GetWorkerState(self, request: worker_pb2.GetWorkerStateRequest, context: Any) -> worker_pb2.WorkerState:
        return worker_pb2.WorkerState(num_sequences=self.num_sequences)

    def _expect(self, holds: bool, otherwise: str) -> None:
        if not holds:
            self.violations.append(otherwise)


def worker_info(model: str, tokenizer_fingerprint: str, seconds: float) -> worker_pb2.WorkerInfo:
    """Steps take as long with 1 token as with 128: drafting pays."""
    return worker_pb2.WorkerInfo(
        model=model,
        fingerprint="fake",
        tokenizer_fingerprint=tokenizer_fingerprint,
        vocab_size=VOCAB_SIZE,
        max_context=512,
        eos_token_ids=[0],
        block_size=16,
        block_bytes=16 * 1024,
        num_blocks=1024,
        max_batch_tokens=512,
        device="none",
        dtype="float32",
        step_costs=[worker_pb2.StepCost(num_tokens=size, seconds=seconds) for size in (1, 128)],
    )


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


@dataclass(eq=False)
class DraftSequence:
    token_ids: list[int]
    params: worker_pb2.SequenceParams


class FakeDrafter(Worker, draft_pb2_grpc.DrafterServicer):
    """`answer` says what it does, `answers` what else by number of the Propose that asks for tokens (from 0); with
    `gate` cleared, it answers none. `trees`: the steps and sizes of those asked for; `num_begun` counts the sequences
    it was told of from their beginning."""

    def __init__(self, tokenizer_fingerprint: str) -> None:
        super().__init__(worker_info("fake-draft", tokenizer_fingerprint, DRAFT_SECONDS))
        self.answer = Answer.PROPOSE
        self.answers: dict[int, Answer] = {}
        self.num_asked = 0
        self.trees: list[tuple[int, int]] = []
        self.num_begun = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.streams: list[dict[int, DraftSequence]] = []

    @property
    def num_sequences(self) -> int:
        return sum(map(len, self.streams))

    def _register(self, server: grpc.aio.Server) -> None:
        draft_pb2_grpc.add_DrafterServicer_to_server(self, server)

    async def Serve(self, request_iterator: AsyncIterator[draft_pb2.DraftRequest], context: Any) -> None:  # type: ignore[override]
        sequences: dict[int, DraftSequence] = {}
        self.streams.append(sequences)
        try:
            async for request in request_iterator:
                for operation in request.operations:
                    if operation.WhichOneof("operation") == "release":
                        sequences.pop(operation.release, None)
                        continue
                    for result in await self._propose(sequences, operation.propose, context):
                        stats = worker_pb2.StepStats(seconds=DRAFT_SECONDS, num_tokens=1, num_sequences=1)
                        await context.write(draft_pb2.DraftResponse(results=[result], stats=stats))
        finally:
            self.streams = [each for each in self.streams if each is not sequences]

    async def _propose(
        self, sequences: dict[int, DraftSequence], propose: draft_pb2.Propose, context: Any
    ) -> list[draft_pb2.DraftResult]:
        answer = self.answer
        if propose.num_draft_tokens:
            answer = self.answers.pop(self.num_asked, answer)
            self.num_asked += 1
            await self.gate.wait()
        if propose.base_length == 0:
            self._expect(0 < propose.num_prompt_tokens <= len(propose.token_ids), "a beginning without its prompt")
            self._expect(propose.sequence_id not in sequences, f"sequence {propose.sequence_id} twice")
            self.num_begun += 1
            sequences[propose.sequence_id] = DraftSequence(list(propose.token_ids), propose.params)
        position = propose.base_length + len(propose.token_ids)
        result = draft_pb2.DraftResult(sequence_id=propose.sequence_id, position=position, num_computed=position)
        if answer is Answer.UNKNOWN:
            sequences.pop(propose.sequence_id, None)
        if answer is Answer.ABORT:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "scripted")
        sequence = sequences.get(propose.sequence_id)
        if sequence is None:
            result.status = draft_pb2.DRAFT_STATUS_UNKNOWN_SEQUENCE
            return [result]
        if propose.base_length:
            self._expect(
                len(sequence.token_ids) == propose.base_length, "tokens that do not continue those told before"
            )
            sequence.token_ids += propose.token_ids
        if propose.num_draft_tokens == 0 or answer is Answer.HANG:
            return []
        if answer in _REFUSALS:
            del sequences[propose.sequence_id]
            result.status = _REFUSALS[answer]
            return [result]
        result.status = draft_pb2.DRAFT_STATUS_PROPOSED
        if answer is Answer.GARBAGE:
            result.proposal.token_ids[:] = [2**31] * (propose.num_draft_tokens + 5)
            result.proposal.sources[:] = [inference_pb2.DRAFT_SOURCE_MODEL] * len(result.proposal.token_ids)
        elif answer is not Answer.EMPTY:
            key = key_of(sequence.params)
            if propose.num_nodes > propose.num_draft_tokens:
                self.trees.append((propose.num_draft_tokens, propose.num_nodes))
                tokens, rows = tree_tokens(sequence.token_ids, propose.num_draft_tokens, propose.num_nodes, key)
                result.proposal.parents[:] = rows
            else:
                tokens = draft_tokens(sequence.token_ids, propose.num_draft_tokens, key)
            result.proposal.token_ids[:] = tokens
            result.proposal.sources[:] = [inference_pb2.DRAFT_SOURCE_MODEL] * len(result.proposal.token_ids)
        if answer is Answer.LATE:
            stale = draft_pb2.DraftResult(
                sequence_id=propose.sequence_id, position=position - 1, status=draft_pb2.DRAFT_STATUS_PROPOSED
            )
            return [stale, result]
        return [result]
