"""One request's life: placed and prefilled, its sequences run, their chunks written, released at the end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from outrider.v1 import inference_pb2

from services.router.clients.chunk_queue import ChunkQueue, Write
from services.router.clients.request import GenerateOptions
from services.router.clients.usage import UsageMeter
from services.router.generation.passage import Passage
from services.router.generation.sequence_session import SequenceSession
from services.router.text.detokenizer import Detokenizer
from services.router.text.tokenizer import TextTokenizer
from services.router.workers.draft_link import DraftLane
from services.router.workers.fleet import Fleet
from services.router.workers.target_lane import TargetLane
from services.router.workers.target_link import TargetLink
from shared.rpc.errors import Unavailable
from shared.sampling.params import SamplingParams
from shared.telemetry.attributes import (
    PLACEMENT_COST,
    PLACEMENT_HARM,
    PLACEMENT_PREFILL_WORKER,
    PLACEMENT_PREFIX_TOKENS,
    PLACEMENT_TTFT,
    PLACEMENT_WORKER,
)
from shared.telemetry.tracing import Telemetry, current_traceparent


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
        self.fleet = fleet
        self.options = options
        if options.num_draft_tokens is not None and self._may_draft and fleet.choose_draft() is not None:
            # Rounds of so many are the draft workers': what a target drafted beside them would be more.
            params = tuple(replace(each, self_draft=None) for each in options.params)
            self.options = replace(options, params=params)
        self.usage = usage
        self.telemetry = telemetry
        self._tokenizer = tokenizer
        self._cache_salt = cache_salt
        self._failover_seconds = failover_seconds
        self._num_open = len(options.params)
        self._most_tokens = len(options.prompt_ids) + options.params[0].max_tokens
        self._blamed: set[TargetLink] = set()
        # A client that reads slowly does not hold KV blocks idle meanwhile.
        self._chunks = ChunkQueue()

    async def run(self, write: Write, generated: Callable[[], None]) -> None:
        """Generates all sequences; calls `generated` when that is over, well or not, and writing may still go on.

        Raises Unavailable when workers fail for good, Aborted when the client does not read.
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
        sequences: list[SequenceSession] = []
        tasks: list[asyncio.Task[None]] = []
        try:
            lanes, passage = await self.begin(self.options.prompt_ids, self.options.params)
            for params, lane in zip(self.options.params, lanes, strict=True):
                sequence = SequenceSession(self, params, lane, passage, self._detokenizer())
                sequences.append(sequence)
                tasks.append(asyncio.create_task(sequence.run(self._emit)))
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            # A task cancelled before its first step releases nothing. Now, not behind the wait below: we may be
            # cancelled again in it (a deadline is over here and at the client at the same time).
            for each in sequences:
                each.release()
            try:
                # What those that others end with have taken is still told.
                await asyncio.gather(*tasks, return_exceptions=True)
            finally:
                self._chunks.end()

    async def begin(
        self, token_ids: Sequence[int], params: Sequence[SamplingParams], avoided: Collection[TargetLink] = ()
    ) -> tuple[list[TargetLane], Passage | None]:
        """Places these tokens: a lane for each of `params`, and what takes them on to where they are decoded, if that
        is another worker. Those of `avoided` are taken only if need be.

        With no worker there it is waited for one: they may all be on their way back. Raises Unavailable in the end.
        """
        deadline = time.monotonic() + self._failover_seconds
        while True:
            await self.fleet.wait_until_usable(max(0.0, deadline - time.monotonic()), self._most_tokens)
            with suppress(Unavailable):  # lost again before anything was placed there
                return await self._prefill(token_ids, params, avoided)

    async def _prefill(
        self, token_ids: Sequence[int], params: Sequence[SamplingParams], avoided: Collection[TargetLink]
    ) -> tuple[list[TargetLane], Passage | None]:
        """As `begin`, at once. Raises Unavailable if there is no worker now."""
        with self.telemetry.span("place") as span:
            placed = await self.fleet.placer.place(token_ids, self._cache_salt, self._most_tokens, avoided)
            span.set_attributes(
                {
                    PLACEMENT_WORKER: placed.decode.address,
                    PLACEMENT_PREFILL_WORKER: placed.first.address,
                    PLACEMENT_PREFIX_TOKENS: placed.prefix_tokens,
                    PLACEMENT_COST: placed.plan.cost,
                    PLACEMENT_TTFT: placed.plan.ttft,
                    PLACEMENT_HARM: placed.plan.harm,
                }
            )
        self.usage.placed(placed.plan.ttft)
        first, parent = placed.first, current_traceparent()
        num_prompt_tokens = len(self.options.prompt_ids)
        pull_id = 0
        if placed.plan.fetch is not None:
            observe = partial(self.fleet.placer.observe_transfer, placed.source, first)
            address = placed.source.address if placed.source is not None else None
            pull_id = first.pull(address, b"", token_ids, self._cache_salt, parent, observe)
        lanes = first.prefill(
            token_ids,
            num_prompt_tokens,
            params,
            1 if placed.remote_prefill else self.num_first_steps(placed.decode),
            self._cache_salt,
            parent,
            pull_id,
            only_user=True,
            num_held=placed.prefix_tokens,
            block_hashes=placed.block_hashes,
        )
        if not placed.remote_prefill:
            return lanes, None
        observe = partial(self.fleet.placer.observe_transfer, first, placed.decode)
        passage = Passage(first, placed.decode, lanes, token_ids, num_prompt_tokens, self._cache_salt, parent, observe)
        return lanes, passage

    async def away_from(self, lane: TargetLane, token_ids: Sequence[int]) -> Passage | None:
        """A passage for a sequence whose worker is going, all of whose results are here, to another; None if there is
        none: it may end where it is."""
        try:
            placed = await self.fleet.placer.place(token_ids, self._cache_salt, self._most_tokens, [lane.link])
        except Unavailable:
            return None
        observe = partial(self.fleet.placer.observe_transfer, lane.link, placed.decode)
        num_prompt_tokens, parent = len(self.options.prompt_ids), current_traceparent()
        return Passage(
            lane.link, placed.decode, [lane], token_ids, num_prompt_tokens, self._cache_salt, parent, observe
        )

    def blame(self, link: TargetLink) -> None:
        """Counts a failure of this request's against the worker: one, however often and for however many sequences,
        so that a request that no worker can compute does not pass for so many broken workers."""
        if link not in self._blamed:
            self._blamed.add(link)
            link.breaker.failed()

    def num_first_steps(self, link: TargetLink) -> int:
        """Steps granted with a prompt to that worker. Who may draft decides behind the first token, unless it is known
        that nobody drafts there now; others go on in the next step, which does not wait for the router."""
        if not self._may_draft:
            return link.num_ahead
        if self.options.num_draft_tokens is not None:
            return 1
        controller = self.fleet.gamma(link, self.fleet.choose_draft())
        return link.num_ahead if controller is not None and controller.declines else 1

    @property
    def _may_draft(self) -> bool:
        return self.fleet.may_draft and self.options.speculation_enabled and self.options.sources is not None

    def draft_lane(self, params: SamplingParams) -> DraftLane | None:
        if not self._may_draft:
            return None
        num_prompt_tokens, sources = len(self.options.prompt_ids), self.options.sources or ()
        return DraftLane(self.fleet.choose_draft, num_prompt_tokens, params, self._cache_salt, sources)

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
