"""Time to first token of a long prompt whose prefix is nowhere, here, on another worker, or in Redis."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from statistics import median
from typing import Final

from outrider.v1 import inference_pb2_grpc
from redis.asyncio import Redis

from services.cli.stack import Stack
from services.simulator.workload import Request
from services.target.stored_prefixes import ENGINE as REDIS
from shared.redis.server import RedisServer
from shared.telemetry.attributes import TRANSFER_BYTES, TRANSFER_ENGINE, TRANSFER_PEER
from tests.benchmarks.errors import BenchmarkError
from tests.benchmarks.measurement import OnStep
from tests.benchmarks.model_pair import Pair
from tests.benchmarks.pools.setup import COLOCATED, serving
from tests.benchmarks.pools.trace import play
from tests.benchmarks.second_router import second_router
from tests.support.otlp import OtlpReceiver, otlp_receiver
from tests.support.service import generate, inference, wait_until_idle, worker_state

COLD, HERE, PEER, STORE = "cold", "same worker", "another worker", "Redis"
BARS: Final = {HERE: 10.0, PEER: 4.0, STORE: 3.0}
"""How many times sooner than cold the first token should come."""

PROMPT_TOKENS: Final = 1500
# Whole blocks, and not all of the prompt.
_PREFIX_TOKENS = 1488
_OUTPUT_TOKENS = 32
_BLOCK_TOKENS = 16
# What keeps the other worker busy: sequences of one request, so that all are in one place.
_BUSY_SEQUENCES = 16
_BUSY_TOKENS = 4000
_SPARE_SAMPLES = 2
# In which the index learns of a prefix.
_PUBLISH_SECONDS = 0.5
_POLL_SECONDS = 0.05
_WAIT_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Sample:
    """One prompt. By what its prefix came, whence and how much, from the trace: empty and 0 if it did not come."""

    where: str
    ttft_seconds: float
    cached_tokens: int
    transfer_engine: str
    transfer_peer: str
    transfer_bytes: int


@dataclass(frozen=True, slots=True)
class Row:
    """Of all samples of a kind: the median, and how many times sooner than cold it is."""

    where: str
    ttft_seconds: float
    speedup: float
    cached_tokens: int
    transfer_engine: str
    transfer_bytes: int


@dataclass(frozen=True, slots=True)
class _Timed:
    """A prompt, and when it ran, in Unix nanoseconds."""

    where: str
    ttft_seconds: float
    cached_tokens: int
    began_ns: int
    ended_ns: int


async def measure_prefixes(pair: Pair, samples: int, on_step: OnStep) -> list[Sample]:
    """So many prompts of each kind, each with a prefix of its own.

    Raises BenchmarkError if a prefix was not found, or came from elsewhere than it was to.
    """
    on_step("starting 2 workers")
    with otlp_receiver() as receiver:
        async with serving(COLOCATED, pair, _traced(receiver)) as stack:
            timed = await _in_memory(pair, stack, samples, on_step)
            peer, more = await _on_a_peer(pair, stack, samples, on_step)
        made = [_sample(each, receiver) for each in timed]
        made += _from_peer([_sample(each, receiver) for each in more], peer)
    with RedisServer() as redis, otlp_receiver() as receiver:
        stored = {
            name: {f"OUTRIDER_{service}_PREFIX_STORE": redis.url}
            for name, service in [("router", "ROUTER"), *((worker, "TARGET") for worker in COLOCATED.workers)]
        }
        prefixes = [pair.prompts(_PREFIX_TOKENS) for _ in range(samples)]
        on_step("computing prefixes for Redis")
        async with serving(COLOCATED, pair, stored) as stack, inference(stack) as stub:
            for prefix in prefixes:
                await _send(pair, stub, COLD, prefix)
            await _until_stored(redis, samples * _PREFIX_TOKENS // _BLOCK_TOKENS)
        # Workers that have never seen them.
        on_step("prefixes in Redis")
        environment = _traced(receiver)
        for name, added in stored.items():
            environment[name] |= added
        async with serving(COLOCATED, pair, environment) as stack, inference(stack) as stub:
            timed = [await _send(pair, stub, STORE, prefix) for prefix in prefixes]
        made += [_sample(each, receiver) for each in timed]
    for each in made:
        _check(each)
    return made


def rows_of(samples: Sequence[Sample]) -> list[Row]:
    """Medians, but of tokens and bytes the least."""
    kinds = {where: [each for each in samples if each.where == where] for where in (COLD, HERE, PEER, STORE)}
    cold = median(each.ttft_seconds for each in kinds[COLD])
    return [
        Row(
            where,
            ttft := median(each.ttft_seconds for each in found),
            cold / ttft,
            min(each.cached_tokens for each in found),
            found[0].transfer_engine,
            min(each.transfer_bytes for each in found),
        )
        for where, found in kinds.items()
    ]


async def _in_memory(pair: Pair, stack: Stack, samples: int, on_step: OnStep) -> list[_Timed]:
    """By a router that knows one worker."""
    timed = []
    async with second_router(stack, COLOCATED.workers[:1]) as stub:
        for number in range(samples):
            on_step(f"cold and repeated, {number + 1} of {samples}")
            prefix = pair.prompts(_PREFIX_TOKENS)
            timed.append(await _send(pair, stub, COLD, prefix))
            timed.append(await _send(pair, stub, HERE, prefix))
    return timed


async def _on_a_peer(pair: Pair, stack: Stack, samples: int, on_step: OnStep) -> tuple[str, list[_Timed]]:
    """Prompts whose prefix is on a worker that is busy with other streams; that worker's address, too.

    They are brought there by a router that knows no other worker. Some more than asked for: whether to fetch is for the
    policy to decide, and it may find the busy worker soon enough.
    """
    await wait_until_idle(stack)
    timed = []
    async with (
        inference(stack) as stub,
        _busy_worker(pair, stack, stub) as name,
        second_router(stack, [name]) as to_it,
    ):
        for number in range(samples + _SPARE_SAMPLES):
            on_step(f"on another worker, {number + 1} of {samples + _SPARE_SAMPLES}")
            prefix = pair.prompts(_PREFIX_TOKENS)
            await _send(pair, to_it, COLD, prefix)
            await asyncio.sleep(_PUBLISH_SECONDS)
            timed.append(await _send(pair, stub, PEER, prefix))
        return stack.processes[name].address, timed


@asynccontextmanager
async def _busy_worker(pair: Pair, stack: Stack, stub: inference_pb2_grpc.InferenceAsyncStub) -> AsyncIterator[str]:
    """Keeps one worker decoding, and says which. Raises BenchmarkError if it is not to be found."""
    prompt = pair.prompts(_BLOCK_TOKENS)
    together = generate(stub, prompt, gamma=0, n=_BUSY_SEQUENCES, max_tokens=_BUSY_TOKENS, ignore_eos=True)
    streaming = asyncio.create_task(together)
    try:
        deadline = time.monotonic() + _WAIT_SECONDS
        busy: list[str] = []
        while not busy:
            if time.monotonic() > deadline or streaming.done():
                raise BenchmarkError("no worker is busy with the streams that were to keep it so")
            await asyncio.sleep(_POLL_SECONDS)
            states = {name: await worker_state(stack, name) for name in COLOCATED.workers}
            busy = [name for name, state in states.items() if state.num_sequences == _BUSY_SEQUENCES]
        yield busy[0]
        if streaming.done():
            raise BenchmarkError("the streams that were to keep a worker busy ended")
    finally:
        streaming.cancel()
        await asyncio.gather(streaming, return_exceptions=True)


async def _send(pair: Pair, stub: inference_pb2_grpc.InferenceAsyncStub, where: str, prefix: Sequence[int]) -> _Timed:
    """The prefix with a tail of its own."""
    prompt = [*prefix, *pair.prompts(PROMPT_TOKENS - _PREFIX_TOKENS)]
    began_ns = time.time_ns()
    [served] = await play([Request(0.0, PROMPT_TOKENS, _OUTPUT_TOKENS)], [prompt], lambda place, request: stub)
    return _Timed(where, served.token_times[0], served.cached_tokens, began_ns, time.time_ns())


async def _until_stored(redis: RedisServer, num_blocks: int) -> None:
    async with Redis.from_url(redis.url) as client:
        deadline = time.monotonic() + _WAIT_SECONDS
        while (found := len(await client.keys("*:payload:*"))) < num_blocks:
            if time.monotonic() > deadline:
                raise BenchmarkError(f"{found} of {num_blocks} blocks are in Redis after {_WAIT_SECONDS:g} s")
            await asyncio.sleep(_POLL_SECONDS)


def _traced(receiver: OtlpReceiver) -> dict[str, dict[str, str]]:
    services = {"router": "ROUTER", **dict.fromkeys(COLOCATED.workers, "TARGET")}
    return {name: {f"OUTRIDER_{service}_OTLP_ENDPOINT": receiver.endpoint} for name, service in services.items()}


def _sample(timed: _Timed, receiver: OtlpReceiver) -> Sample:
    """With what the trace says."""
    spans = [span for span in receiver.named("kv.transfer") if timed.began_ns <= span.start_ns <= timed.ended_ns]
    engines = [str(span.attributes[TRANSFER_ENGINE]) for span in spans]
    peers = [str(span.attributes[TRANSFER_PEER]) for span in spans]
    num_bytes = sum(_int(span.attributes[TRANSFER_BYTES]) for span in spans)
    return Sample(timed.where, timed.ttft_seconds, timed.cached_tokens, ", ".join(engines), ", ".join(peers), num_bytes)


def _from_peer(samples: Sequence[Sample], peer: str) -> list[Sample]:
    """Those that were fetched from there. Raises BenchmarkError if none was."""
    found = [each for each in samples if each.transfer_peer == peer]
    if not found:
        raise BenchmarkError(f"of {len(samples)} prompts whose prefix a busy worker had none was computed elsewhere")
    return found


def _check(sample: Sample) -> None:
    """Raises BenchmarkError if a prompt did not find what it was to, or not there."""
    as_meant = {
        COLD: not sample.transfer_engine and not sample.cached_tokens,
        HERE: not sample.transfer_engine and sample.cached_tokens == _PREFIX_TOKENS,
        PEER: sample.cached_tokens == _PREFIX_TOKENS,
        STORE: sample.transfer_engine == REDIS and sample.cached_tokens == _PREFIX_TOKENS,
    }
    if not as_meant[sample.where]:
        came = f"{sample.transfer_bytes} bytes by {sample.transfer_engine or 'nothing'}"
        raise BenchmarkError(f"prefix {sample.where}: {sample.cached_tokens} tokens were cached; it fetched {came}")


def _int(value: object) -> int:
    assert isinstance(value, int)
    return value
