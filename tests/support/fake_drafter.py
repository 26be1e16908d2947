"""A draft worker with no model, which is right about three times in four, or answers as a test says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import grpc
from outrider.v1 import draft_pb2, draft_pb2_grpc, inference_pb2, worker_pb2

from tests.support.fake_workers import Worker, draft_tokens, key_of, tree_tokens, worker_info

DRAFT_SECONDS = 0.0005


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
