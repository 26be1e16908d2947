"""What steps of a worker really take, measured through the service.

What workers measure at warm-up is not that. They compute up to 128 tokens, each without a context and with logits of
its own, and nothing but the forward; those that start together disturb each other. A step in service attends to its
context, samples and answers a router, and takes prompts in larger chunks; another worker streams its weights from the
same memory; router and client need processor time, too. So it is measured as it is served, alone and beside others.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import TypeAlias

from outrider.v1 import inference_pb2_grpc

from services.simulator.workload import Request
from tests.benchmarks.errors import BenchmarkError
from tests.benchmarks.pools.trace import Served, play
from tests.benchmarks.prompts import Prompts

_STREAMS = (1, 4, 8, 16)
_STREAM_TOKENS = 32
# Prompts of streams: as good as none, and ones that show what their contexts cost.
_SHORT, _LONG = 16, 768
_LONG_STREAMS = 4
_CHUNKS = (64, 256, 512, 1536)
# The price of attention is seen on so many tokens behind so many others that are cached.
_TAIL, _PREFIX = 512, 1536
# A worker that is busy: streams, and prompts that take half of its time.
_BUSY_STREAMS = 4
_ENDLESS = 4096
_BUSY_PROMPT = 512
_SECONDS_BETWEEN_PROMPTS = 2.0
_NUM_BUSY_PROMPTS = 200


Costs: TypeAlias = tuple[tuple[int, float], ...]
"""Seconds of a step by the tokens in it, fewest first."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """What a worker's steps take, in seconds: `costs` by the tokens in them, without any context, and more for what
    they attend to: `attention_seconds` for each token that one of a prompt does, `context_seconds` for each that one of
    a stream does.

    `latency_seconds`: of a request's first token, beside the step it is computed in.
    """

    costs: Costs
    attention_seconds: float
    context_seconds: float
    latency_seconds: float


async def calibrate(
    stub: inference_pb2_grpc.InferenceAsyncStub, prompts: Prompts, max_batch_tokens: int, turns: int
) -> Calibration:
    """Measures the one worker behind `stub`, which is to have nothing else to do; means of so many turns: the machine's
    slow moments are in what is served, too.

    Raises BenchmarkError if a stream fails.
    """
    chunks = [size for size in _CHUNKS if size <= max_batch_tokens]
    singles, tails, decodes, long_decodes, prefills = [], [], [], [], []
    for _ in range(turns):
        singles.append(await _first_token(stub, prompts(1)))
        decodes.append([await _step_of(stub, prompts, count, _SHORT) for count in _STREAMS])
        long_decodes.append(await _step_of(stub, prompts, _LONG_STREAMS, _LONG))
        prefills.append([await _first_token(stub, prompts(size)) for size in chunks])
        prefix = prompts(_PREFIX)
        await _first_token(stub, prefix)
        tails.append(await _first_token(stub, prefix + prompts(_TAIL)))
    step = dict(zip(_STREAMS, map(fmean, zip(*decodes, strict=True)), strict=True))
    prefill = dict(zip(chunks, map(fmean, zip(*prefills, strict=True)), strict=True))
    attention = max(0.0, (fmean(tails) - prefill[_TAIL]) / (_TAIL * _PREFIX))
    context = max(0.0, (fmean(long_decodes) - step[_LONG_STREAMS]) / (_LONG_STREAMS * (_LONG - _SHORT)))
    latency = max(0.0, fmean(singles) - step[1])
    num_attended = _SHORT + _STREAM_TOKENS / 2
    costs = [(count, seconds - context * count * num_attended) for count, seconds in step.items()]
    costs += [(size, seconds - latency - attention * size * (size + 1) / 2) for size, seconds in prefill.items()]
    return Calibration(tuple(costs), attention, context, latency)


@asynccontextmanager
async def busy(stub: inference_pb2_grpc.InferenceAsyncStub, prompts: Prompts) -> AsyncIterator[None]:
    """Streams decode on the worker behind `stub` meanwhile, and prompts come. Raises BenchmarkError if they end."""
    requests = [Request(0.0, _SHORT, _ENDLESS)] * _BUSY_STREAMS
    requests += [Request(_SECONDS_BETWEEN_PROMPTS * number, _BUSY_PROMPT, 1) for number in range(_NUM_BUSY_PROMPTS)]
    texts = [prompts(request.num_prompt_tokens) for request in requests]
    running = asyncio.create_task(_play(stub, requests, texts))
    try:
        yield
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def _first_token(stub: inference_pb2_grpc.InferenceAsyncStub, prompt: list[int]) -> float:
    [served] = await _play(stub, [Request(0.0, len(prompt), 1)], [prompt])
    return served.token_times[0]


async def _step_of(stub: inference_pb2_grpc.InferenceAsyncStub, prompts: Prompts, count: int, num_tokens: int) -> float:
    """Seconds from one token to the next while so many streams decode, behind prompts of so many tokens."""
    requests = [Request(0.0, num_tokens, _STREAM_TOKENS)] * count
    served = await _play(stub, requests, [prompts(num_tokens) for _ in requests])
    # While all of them do.
    begin, end = max(each.token_times[0] for each in served), min(each.token_times[-1] for each in served)
    gaps = [
        after - before
        for each in served
        for before, after in pairwise(each.token_times)
        if before >= begin and after <= end
    ]
    if not gaps:
        raise BenchmarkError(f"{count} streams did not run together")
    return fmean(gaps)


async def _play(
    stub: inference_pb2_grpc.InferenceAsyncStub, requests: list[Request], texts: list[list[int]]
) -> list[Served]:
    return await play(requests, texts, lambda place, request: stub)
