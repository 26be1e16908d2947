"""Clients that cancel, run out of time or vanish: every stream ends rightly, and nothing is left behind."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable

import grpc
import pytest
import pytest_asyncio
from outrider.v1 import inference_pb2, inference_pb2_grpc

from services.cli.stack import Stack
from shared.models import DEMO_TARGET
from shared.rpc.channel import connect
from tests.support.greedy import Reference, python_prompts, references
from tests.support.service import collect, request, running_stack, status, wait_until_idle

pytestmark = pytest.mark.asyncio(loop_scope="module")

NUM_STREAMS = 64
NUM_TOKENS = 96
PROMPT_LENGTHS = (20, 200)
GAMMAS = (0, 2, 4, None)
# Within which a stream's deadline, if it has one, is over: before it can end.
MAX_DEADLINE_SECONDS = 0.2
# A leaked block or slot shows as streams that wait for ever.
ALL_ENDED_SECONDS = 90


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack() -> AsyncIterator[Stack]:
    """Half the streams wait for their turn, and the blocks of one worker do not do for its share of them."""
    few_blocks = {"OUTRIDER_TARGET_NUM_BLOCKS": "96", "OUTRIDER_TARGET_MAX_BATCH_TOKENS": "64"}
    router = {"OUTRIDER_ROUTER_MAX_RUNNING": "32"}
    async with running_stack(
        {"router": router, "target-0": few_blocks, "target-1": few_blocks}, num_targets=2
    ) as running:
        yield running


@pytest.fixture(scope="module")
def expected() -> list[Reference]:
    return [
        reference
        for length in PROMPT_LENGTHS
        for reference in references(DEMO_TARGET, python_prompts(length), 4, NUM_TOKENS)
    ]


class AfterChunks:
    """Does something once that many chunks have come."""

    def __init__(self, num_chunks: int, action: Callable[[], object]) -> None:
        self._left = num_chunks
        self._action = action

    def __call__(self, chunk: inference_pb2.GenerateResponse) -> None:
        self._left -= 1
        if self._left == 0:
            self._action()


async def left_alone(stack: Stack, reference: Reference, dice: random.Random) -> None:
    async with connect(stack.router_address) as channel:
        answer = await collect(start(channel, reference, dice))
    assert answer.token_ids == reference.token_ids


async def cancelled(stack: Stack, reference: Reference, dice: random.Random) -> None:
    async with connect(stack.router_address) as channel:
        call = start(channel, reference, dice)
        num_chunks = dice.randrange(6)
        if num_chunks == 0:
            call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await collect(call, AfterChunks(num_chunks, call.cancel))
        assert await call.code() is grpc.StatusCode.CANCELLED


async def out_of_time(stack: Stack, reference: Reference, dice: random.Random) -> None:
    async with connect(stack.router_address) as channel:
        call = start(channel, reference, dice, timeout=dice.uniform(0, MAX_DEADLINE_SECONDS))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(call)
        assert status(caught.value) is grpc.StatusCode.DEADLINE_EXCEEDED


async def disconnected(stack: Stack, reference: Reference, dice: random.Random) -> None:
    channel = connect(stack.router_address)
    call = start(channel, reference, dice)
    gone = asyncio.Event()
    reading = asyncio.create_task(collect(call, AfterChunks(dice.randint(1, 6), gone.set)))
    await gone.wait()
    await channel.close()
    with pytest.raises((asyncio.CancelledError, grpc.aio.AioRpcError)):
        await reading


FATES = (left_alone, cancelled, out_of_time, disconnected)


def start(
    channel: grpc.aio.Channel, reference: Reference, dice: random.Random, timeout: float | None = None
) -> grpc.aio.UnaryStreamCall[inference_pb2.GenerateRequest, inference_pb2.GenerateResponse]:
    """Greedy from the reference's prompt; what it takes to serve it is random."""
    made = request(reference.prompt, gamma=dice.choice(GAMMAS), max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
    return inference_pb2_grpc.InferenceStub(channel).Generate(made, timeout=timeout)


@pytest.mark.parametrize("seed", [0, 1])
async def test_64_streams_with_random_ends(stack: Stack, expected: list[Reference], seed: int) -> None:
    dice = random.Random(seed)
    fates = [dice.choice(FATES) for _ in range(NUM_STREAMS)]
    assert set(fates) == set(FATES)
    async with asyncio.timeout(ALL_ENDED_SECONDS):
        results = await asyncio.gather(
            *(fate(stack, expected[i % len(expected)], random.Random(1000 * seed + i)) for i, fate in enumerate(fates)),
            return_exceptions=True,
        )
    failures = [
        f"stream {i}, {fate.__name__}: {result!r}"
        for i, (fate, result) in enumerate(zip(fates, results, strict=True))
        if result is not None
    ]
    assert not failures
    await wait_until_idle(stack)
    assert all(process.restarts == 0 for process in stack.processes.values())
