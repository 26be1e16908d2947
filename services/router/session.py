"""One request's life: prefill, rounds until every sequence has ended, failover in between, release at the end."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from opentelemetry import trace
from outrider.v1 import inference_pb2, target_pb2

from services.router.chunk_queue import ChunkQueue, Write
from services.router.detokenizer import Detokenizer
from services.router.draft_link import DraftLane
from services.router.fleet import Fleet
from services.router.gamma import Acceptance
from services.router.request import GenerateOptions
from services.router.target_link import LaneResult, TargetLane, WorkerLost
from services.router.tokenizer import TextTokenizer
from services.router.usage import UsageMeter
from shared.rpc.errors import Internal, Unavailable
from shared.sampling.params import SamplingParams
from shared.telemetry.attributes import (
    NUM_ACCEPTED,
    NUM_DRAFT_TOKENS,
    PLACEMENT_PREFIX_TOKENS,
    PLACEMENT_WORKER,
    ROUND,
    SEQUENCE_INDEX,
)
from shared.telemetry.tracing import Telemetry, traceparent

logger = logging.getLogger(__name__)

# Plain decoding: steps a worker may run ahead, and what is left of them when more are granted. Enough that
# the worker never waits for the router; little enough that a change to drafting is not long in coming.
_GRANTED_STEPS = 16
_REFILL_BELOW = 8
# Prefills of a sequence in a row that may fail before the request does.
_MAX_FAILURES = 4


class Session:
    """A request that was admitted. `run` writes its chunks, and leaves nothing behind on any worker."""

    def __init__(
        self,
        options: GenerateOptions,
        fleet: Fleet,
        tokenizer: TextTokenizer,
        usage: UsageMeter,
        telemetry: Telemetry,
        cache_salt: bytes,
        failover_seconds: float,
    ) -> None:
        self.options = options
        self.fleet = fleet
        self.usage = usage
        self.telemetry = telemetry
        self._tokenizer = tokenizer
        self._cache_salt = cache_salt
        self._failover_seconds = failover_seconds
        self._num_open = len(options.params)
        # A client that reads slowly does not hold KV blocks idle meanwhile.
        self._chunks = ChunkQueue()

    async def run(self, write: Write, generated: Callable[[], None]) -> None:
        """Generates all sequences; calls `generated` when that is over, well or not, and writing may still go on.

        Raises Unavailable or Internal when workers fail for good, Aborted when the client does not read.
        """
        generating = asyncio.create_task(self._generate())
        generating.add_done_callback(lambda _: generated())
        try:
            await self._chunks.write_to(write)
            await generating
        finally:
            generating.cancel()
            await asyncio.gather(generating, return_exceptions=True)

    async def _generate(self) -> None:
        """Runs all sequences, and puts their chunks in the queue."""
        lanes: list[TargetLane] = []
        tasks: list[asyncio.Task[None]] = []
        try:
            lanes = await self.prefill(self.options.prompt_ids, self.options.params)
            for params, lane in zip(self.options.params, lanes, strict=True):
                sequence = SequenceSession(self, params, lane, self._detokenizer())
                tasks.append(asyncio.create_task(sequence.run(self._emit)))
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            # A task cancelled before its first step has released nothing.
            for lane in lanes:
                lane.release()
            self._chunks.end()

    async def prefill(self, token_ids: Sequence[int], params: Sequence[SamplingParams]) -> list[TargetLane]:
        """Places these tokens on a target worker, a lane for each of `params`."""
        with self.telemetry.span("place") as span:
            link, num_blocks = await self.fleet.place(token_ids, self._cache_salt)
            span.set_attribute(PLACEMENT_WORKER, link.address)
            span.set_attribute(PLACEMENT_PREFIX_TOKENS, num_blocks * self.fleet.model.block_size)
        return link.prefill(token_ids, len(self.options.prompt_ids), params, 1, self._cache_salt, current_traceparent())

    async def prefill_again(self, token_ids: Sequence[int], params: SamplingParams) -> TargetLane:
        """A new lane for a sequence whose worker was lost, on another worker or on the same one, back up."""
        deadline = time.monotonic() + self._failover_seconds
        while True:
            await self.fleet.wait_until_usable(max(0.0, deadline - time.monotonic()))
            with suppress(Unavailable):  # it was lost again before the sequence was placed there
                [lane] = await self.prefill(token_ids, [params])
                return lane

    def draft_lane(self, params: SamplingParams) -> DraftLane | None:
        if self.fleet.draft is None or not self.options.speculation_enabled or self.options.num_draft_tokens == 0:
            return None
        return DraftLane(self.fleet.draft, len(self.options.prompt_ids), params, self._cache_salt)

    def text_of(self, token_id: int) -> str:
        return self._tokenizer.decode([token_id])

    def _detokenizer(self) -> Detokenizer:
        return Detokenizer(self._tokenizer, self.options.stop_strings, self.options.prompt_ids)

    def _emit(self, chunk: inference_pb2.GenerateResponse) -> None:
        # Sequences share the stream, and the last chunk of the last one carries the usage.
        if chunk.finish_reason:
            self._num_open -= 1
            if self._num_open == 0 and self.options.include_usage:
                chunk.usage.CopyFrom(self.usage.to_proto())
        self._chunks.put(chunk)


class SequenceSession:
    """One sequence: its committed tokens, its lanes on the workers, its rounds.

    The committed tokens are held here; workers are caches. A worker lost costs a prefill, never a token.
    """

    def __init__(self, session: Session, params: SamplingParams, lane: TargetLane, detokenizer: Detokenizer) -> None:
        self._session = session
        self._options = session.options
        self._params = params
        self._lane = lane
        self._draft = session.draft_lane(params)
        self._detokenizer = detokenizer
        self._token_ids = list(session.options.prompt_ids)
        self._num_rounds = 0
        # Draft tokens that γ's controller wants in the next round, until it begins.
        self._wanted = 0
        # Draft tokens of the latest round.
        self._drafted: list[int] = []
        self._finish_reason: inference_pb2.FinishReason = inference_pb2.FINISH_REASON_UNSPECIFIED
        gamma = session.fleet.gamma(lane.link)
        self._acceptance = Acceptance(None if gamma is None else gamma.acceptance)

    async def run(self, emit: Callable[[inference_pb2.GenerateResponse], None]) -> None:
        """Rounds until the sequence ends; everything is released on every way out."""
        num_failures = 0
        try:
            self._prefill_draft()
            while not self._finish_reason:
                try:
                    entry = await self._lane.next()
                    while True:
                        _check(entry.result, len(self._token_ids))
                        num_failures = 0
                        emit(self._take(entry.result))
                        if self._finish_reason:
                            return
                        entry = await self._next_result(entry)
                except WorkerLost as error:
                    self._lane.release()
                    num_failures += 1
                    if num_failures > _MAX_FAILURES:
                        # Which worker and how is for the log: clients have no business with our addresses.
                        logger.error("target workers failed %d times in a row, last %s", num_failures, error)
                        raise Unavailable(f"target workers failed {num_failures} times in a row") from error
                    self._lane = await self._session.prefill_again(self._token_ids, self._params)
        finally:
            self._lane.release()
            if self._draft is not None:
                self._draft.release()

    def _prefill_draft(self) -> None:
        """Has the drafter take in the prompt while the target does, if rounds are likely to follow."""
        gamma = self._session.fleet.gamma(self._lane.link)
        if self._draft is None or gamma is None:
            return
        fixed = self._options.num_draft_tokens is not None
        if fixed or gamma.pays(self._acceptance.rate, self._lane.link.num_lanes):
            self._draft.prefill(self._token_ids, current_traceparent())

    async def _next_result(self, last: LaneResult) -> LaneResult:
        """The result of a round, or in plain decoding simply the next one."""
        lane = self._lane
        num_draft_tokens = self._num_draft_tokens() if lane.num_steps < _REFILL_BELOW else 0
        # A worker running ahead began this step when it ended the last, however late we come to look.
        load, began = lane.link.num_lanes, last.received if lane.num_steps > 0 else time.monotonic()
        if num_draft_tokens > 0 and lane.num_steps == 0:
            return await self._round(num_draft_tokens)
        if num_draft_tokens == 0 and lane.num_steps < _REFILL_BELOW:
            lane.verify(len(self._token_ids), None, _GRANTED_STEPS, current_traceparent())
        entry = await lane.next()
        gamma = self._session.fleet.gamma(lane.link)
        # Steps that also prefilled say nothing about decoding.
        if gamma is not None and last.result.num_draft_tokens == 0 and 0 < entry.stats.num_tokens <= 2 * load:
            gamma.observe_plain(load, entry.received - began)
        return entry

    async def _round(self, num_draft_tokens: int) -> LaneResult:
        """Draft, verify: one span, with the workers' spans as its children."""
        assert self._draft is not None
        lane, load, began = self._lane, self._lane.link.num_lanes, time.monotonic()
        self._wanted = 0
        with self._session.telemetry.span("round") as span:
            parent = traceparent(span)
            proposal = await self._draft.propose(self._token_ids, num_draft_tokens, parent)
            # Without a proposal it decodes plainly for a while before the drafter is asked again.
            lane.verify(len(self._token_ids), proposal, _GRANTED_STEPS if proposal is None else 1, parent)
            entry = await lane.next()
            self._num_rounds += 1
            span.set_attributes(
                {
                    ROUND: self._num_rounds,
                    SEQUENCE_INDEX: self._params.sequence_index,
                    NUM_DRAFT_TOKENS: entry.result.num_draft_tokens,
                    NUM_ACCEPTED: entry.result.num_accepted,
                }
            )
        drafted = entry.result.num_draft_tokens
        if drafted:
            self._acceptance.observe(drafted, entry.result.num_accepted)
            self._drafted = list(proposal.token_ids) if proposal is not None else []
            gamma = self._session.fleet.gamma(lane.link)
            if gamma is not None and entry.stats.num_tokens <= 2 * load * (drafted + 1):
                gamma.observe_round(load, drafted, entry.received - began)
        return entry

    def _num_draft_tokens(self) -> int:
        """Draft tokens for the next round: as fixed by the request, else as pays; never past max_tokens."""
        gamma = self._session.fleet.gamma(self._lane.link)
        if self._draft is None or not self._draft.available or gamma is None:
            return 0
        wanted = self._options.num_draft_tokens
        if wanted is None:
            # Kept until the round begins, which waits for the steps granted before: a probe is offered only once.
            if self._wanted == 0:
                unseen = len(self._token_ids) - self._draft.num_told
                self._wanted = gamma.choose(self._acceptance.rate, self._lane.link.num_lanes, unseen)
            wanted = self._wanted
        num_output_tokens = len(self._token_ids) - len(self._options.prompt_ids)
        return min(wanted, self._params.max_tokens - num_output_tokens - 1)

    def _take(self, result: target_pb2.StepResult) -> inference_pb2.GenerateResponse:
        """Commits a result's tokens, and puts what the client gets of it into a chunk."""
        tokens = list(result.token_ids)
        stopped = result.status == target_pb2.STEP_STATUS_STOPPED
        delta = self._detokenizer.push(tokens[:-1] if stopped else tokens)
        text = delta.text
        if delta.stopped:
            tokens = tokens[: delta.num_tokens]
            self._finish_reason = inference_pb2.FINISH_REASON_STOP
        elif result.status != target_pb2.STEP_STATUS_RUNNING:
            rest = self._detokenizer.flush()
            text += rest.text
            ended_by_text = stopped or rest.stopped
            self._finish_reason = (
                inference_pb2.FINISH_REASON_STOP if ended_by_text else inference_pb2.FINISH_REASON_LENGTH
            )
        self._token_ids += tokens
        usage = self._session.usage
        usage.tokens_committed(self._params.sequence_index, len(tokens), result.cached_tokens)
        # What a stop string cut off is no output, and so not accepted.
        num_kept = min(result.num_accepted, len(tokens))
        if result.num_draft_tokens:
            usage.round_verified(result.num_draft_tokens, result.num_accepted, num_kept)
        chunk = inference_pb2.GenerateResponse(
            index=self._params.sequence_index,
            text=text,
            token_ids=tokens,
            logprobs=result.logprobs[: len(tokens)],
            finish_reason=self._finish_reason,
        )
        if self._options.include_draft_tokens:
            self._show_draft(chunk, result, tokens, num_kept)
        return chunk

    def _show_draft(
        self,
        chunk: inference_pb2.GenerateResponse,
        result: target_pb2.StepResult,
        tokens: Sequence[int],
        num_kept: int,
    ) -> None:
        """Tells what became of the round's tokens: accepted, rejected, then what the target drew itself."""
        if result.num_draft_tokens == 0:
            last = inference_pb2.TOKEN_ORIGIN_TARGET
        elif result.num_accepted == result.num_draft_tokens:
            last = inference_pb2.TOKEN_ORIGIN_BONUS
        else:
            last = inference_pb2.TOKEN_ORIGIN_RECOVERED
        shown = [(token, inference_pb2.TOKEN_ORIGIN_ACCEPTED) for token in tokens[:num_kept]]
        if result.num_draft_tokens:
            shown += [(token, inference_pb2.TOKEN_ORIGIN_REJECTED) for token in self._drafted[num_kept:]]
        shown += [(token, last) for token in tokens[num_kept:]]
        for token, origin in shown:
            chunk.draft_tokens.add(token_id=token, text=self._session.text_of(token), origin=origin)


def _check(result: target_pb2.StepResult, num_committed: int) -> None:
    """Raises WorkerLost for a result that calls for another prefill, Internal for one that none would help."""
    if result.status == target_pb2.STEP_STATUS_TOO_LARGE:
        raise Internal("a target worker has fewer KV blocks than it said")
    if result.status in (target_pb2.STEP_STATUS_UNKNOWN_SEQUENCE, target_pb2.STEP_STATUS_FAILED):
        raise WorkerLost(target_pb2.StepStatus.Name(result.status))
    if result.position != num_committed:
        raise WorkerLost(f"a result at position {result.position} where {num_committed} was next")


def current_traceparent() -> str:
    """The W3C trace context of the span we are in; empty when not traced."""
    return traceparent(trace.get_current_span())
