"""Load: streams that start together, and what the service makes of them."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass

import grpc.aio
from outrider.v1 import inference_pb2, inference_pb2_grpc

from services.cli.speculation_view import acceptance_rate
from shared.policy.shape import Shape
from tests.benchmarks.errors import BenchmarkError
from tests.support.service import generate


@dataclass(frozen=True, slots=True)
class Mode:
    """Speculation off, on and adaptive, or on with rounds of the `fixed` shape."""

    speculation: bool
    fixed: Shape | None = None


OFF = Mode(speculation=False)
ON = Mode(speculation=True)


@dataclass(frozen=True, slots=True)
class StreamResult:
    """One stream: seconds from sending its request to its first token, and what the service says it used."""

    ttft_seconds: float
    usage: inference_pb2.Usage


@dataclass(frozen=True, slots=True)
class LoadResult:
    """Streams that ran together: `seconds` from the first request sent to the last token received.

    `fixed` is None where speculation was adaptive or off. Token counts are sums over the streams.
    `rounds` counts target steps that verified draft tokens; `acceptance_rate` is α, None if nothing was
    drafted.
    """

    streams: int
    speculation: bool
    fixed: Shape | None
    seconds: float
    ttft_seconds: tuple[float, ...]
    output_tokens: int
    cached_tokens: int
    draft_tokens: int
    accepted_tokens: int
    rounds: int
    acceptance_rate: float | None

    @property
    def mode(self) -> Mode:
        return Mode(self.speculation, self.fixed)


async def run_load(
    stub: inference_pb2_grpc.InferenceAsyncStub,
    prompts: Sequence[list[int]],
    num_tokens: int,
    mode: Mode,
    api_key: str | None = None,
) -> LoadResult:
    """One stream of `num_tokens` greedy output tokens for each prompt, all started at once, by the tenant of `api_key`.

    Raises BenchmarkError if a stream fails or is short; the others end with it.
    """
    gc.freeze()  # or a full collection, of a heap with torch in it, stops all streams for 0.3 s now and then
    streams = [run_stream(stub, prompt, num_tokens, mode, api_key) for prompt in prompts]
    start = time.perf_counter()
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(stream) for stream in streams]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None  # one says it all
    seconds = time.perf_counter() - start
    results = [task.result() for task in tasks]
    usage = _total([result.usage for result in results])
    return LoadResult(
        streams=len(prompts),
        speculation=mode.speculation,
        fixed=mode.fixed,
        seconds=seconds,
        ttft_seconds=tuple(result.ttft_seconds for result in results),
        output_tokens=usage.output_tokens,
        cached_tokens=usage.cached_tokens,
        draft_tokens=usage.draft_tokens,
        accepted_tokens=usage.accepted_tokens,
        rounds=usage.rounds,
        acceptance_rate=acceptance_rate(usage),
    )


async def run_stream(
    stub: inference_pb2_grpc.InferenceAsyncStub,
    prompt: list[int],
    num_tokens: int,
    mode: Mode,
    api_key: str | None = None,
) -> StreamResult:
    """One stream, past any end of text. Raises as `run_load` does."""
    ttft_seconds: float | None = None

    def note_first_token(chunk: inference_pb2.GenerateResponse) -> None:
        nonlocal ttft_seconds
        if ttft_seconds is None and chunk.token_ids:
            ttft_seconds = time.perf_counter() - start

    start = time.perf_counter()
    try:
        generated = await generate(
            stub,
            prompt,
            api_key=api_key,
            on_chunk=note_first_token,
            max_tokens=num_tokens,
            temperature=0.0,
            ignore_eos=True,
            speculation=_speculation(mode),
        )
    except grpc.aio.AioRpcError as error:
        raise BenchmarkError(f"a stream failed with {error.code().name}: {error.details()}") from error
    if ttft_seconds is None or len(generated.token_ids) != num_tokens:
        raise BenchmarkError(f"a stream brought {len(generated.token_ids)} tokens where {num_tokens} were asked for")
    return StreamResult(ttft_seconds, generated.usage)


def _speculation(mode: Mode) -> inference_pb2.Speculation:
    if mode.fixed is None:
        return inference_pb2.Speculation(enabled=mode.speculation)
    num_nodes = mode.fixed.num_nodes if mode.fixed.is_tree else None
    return inference_pb2.Speculation(
        enabled=mode.speculation, num_draft_tokens=mode.fixed.num_draft_tokens, num_nodes=num_nodes
    )


def _total(usages: Sequence[inference_pb2.Usage]) -> inference_pb2.Usage:
    total = inference_pb2.Usage()
    for usage in usages:
        total.output_tokens += usage.output_tokens
        total.cached_tokens += usage.cached_tokens
        total.draft_tokens += usage.draft_tokens
        total.accepted_tokens += usage.accepted_tokens
        total.rounds += usage.rounds
        while len(total.acceptance_by_position) < len(usage.acceptance_by_position):
            total.acceptance_by_position.add()
        for summed, position in zip(total.acceptance_by_position, usage.acceptance_by_position, strict=False):
            summed.drafted += position.drafted
            summed.accepted += position.accepted
    return total
