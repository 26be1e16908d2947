"""A seeded request gives the same tokens however it is served, and whoever dies meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from outrider.v1 import inference_pb2

from services.cli.stack import Stack
from tests.support.service import Generated, OnChunk, generate, inference, running_stack, wait_until_idle, worker_state

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = "def quicksort(items: list[int]) -> list[int]:\n    "
NUM_TOKENS = 144
# Chunks of the stream that have come when a process is killed: far from its end.
HALFWAY_CHUNKS = 12
RESTART_SECONDS = 60
TARGETS = ("target-0", "target-1")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack() -> AsyncIterator[Stack]:
    async with running_stack(num_targets=2) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def undrafted(stack: Stack) -> list[int]:
    """What the request gives with nothing drafted and nothing going wrong."""
    return (await sample(stack, 0)).token_ids


async def sample(stack: Stack, gamma: int | None, on_chunk: OnChunk | None = None) -> Generated:
    """The request that all tests make."""
    async with inference(stack) as stub:
        answer = await generate(
            stub,
            PROMPT,
            gamma=gamma,
            on_chunk=on_chunk,
            max_tokens=NUM_TOKENS,
            temperature=0.8,
            top_p=0.95,
            seed=20,
            ignore_eos=True,
            include_draft_tokens=True,
        )
    assert len(answer.token_ids) == NUM_TOKENS
    return answer


class Halfway:
    """Tells when a stream has come halfway, and what came of its tokens later."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()
        self.num_tokens_behind = 0
        self._num_chunks = 0

    def __call__(self, chunk: inference_pb2.GenerateResponse) -> None:
        self._num_chunks += 1
        if self._num_chunks > HALFWAY_CHUNKS:
            self.num_tokens_behind += len(chunk.token_ids)
        elif self._num_chunks == HALFWAY_CHUNKS:
            self.reached.set()


async def kill_halfway(stack: Stack, gamma: int | None, names: tuple[str, ...] | None = None) -> Generated:
    """Makes the request and halfway kills these processes, or else the target worker that serves it.

    Returns when all is up again.
    """
    halfway = Halfway()
    request = asyncio.create_task(sample(stack, gamma, halfway))
    await halfway.reached.wait()
    if names is None:
        names = tuple([name for name in TARGETS if (await worker_state(stack, name)).num_sequences])
        assert len(names) == 1
    before = {name: stack.processes[name].restarts for name in names}
    for name in names:
        stack.kill(name)
    answer = await request
    assert halfway.num_tokens_behind > NUM_TOKENS // 4
    async with asyncio.timeout(RESTART_SECONDS):
        for name in names:
            await stack.processes[name].ready.wait()
            assert stack.processes[name].restarts == before[name] + 1
    await wait_until_idle(stack)
    return answer


@pytest.mark.parametrize("gamma", [1, 4, 8, None])
async def test_any_number_of_draft_tokens(stack: Stack, undrafted: list[int], gamma: int | None) -> None:
    answer = await sample(stack, gamma)
    assert answer.token_ids == undrafted
    if gamma is not None:
        assert 0 < answer.usage.accepted_tokens < answer.usage.draft_tokens
    await wait_until_idle(stack)


async def test_another_seed_gives_other_tokens(stack: Stack, undrafted: list[int]) -> None:
    async with inference(stack) as stub:
        answer = await generate(
            stub, PROMPT, max_tokens=NUM_TOKENS, temperature=0.8, top_p=0.95, seed=21, ignore_eos=True
        )
    assert answer.token_ids != undrafted


@pytest.mark.parametrize("gamma", [4, pytest.param(None, marks=pytest.mark.long)])
async def test_among_16_others(stack: Stack, undrafted: list[int], gamma: int | None) -> None:
    async with inference(stack) as stub:
        others = [
            asyncio.create_task(
                generate(stub, f"class Other{i}:\n", gamma=(0, 2, 4, None)[i % 4], max_tokens=NUM_TOKENS)
            )
            for i in range(16)
        ]
        assert (await sample(stack, gamma)).token_ids == undrafted
        await asyncio.gather(*others)
    await wait_until_idle(stack)


async def test_drafter_killed_halfway(stack: Stack, undrafted: list[int]) -> None:
    answer = await kill_halfway(stack, 2, ("draft",))
    assert answer.token_ids == undrafted
    origins = [token.origin for token in answer.outputs[0].draft_tokens]
    assert inference_pb2.TOKEN_ORIGIN_ACCEPTED in origins
    # The first token comes from the prefill; those behind it that nobody drafted, from when the drafter was gone.
    assert origins.count(inference_pb2.TOKEN_ORIGIN_TARGET) > 1


@pytest.mark.parametrize("gamma", [0, 2])
async def test_the_serving_one_of_two_targets_killed_halfway(
    stack: Stack, undrafted: list[int], gamma: int | None
) -> None:
    assert (await kill_halfway(stack, gamma)).token_ids == undrafted


async def test_all_targets_killed_halfway_and_started_again(stack: Stack, undrafted: list[int]) -> None:
    assert (await kill_halfway(stack, 2, TARGETS)).token_ids == undrafted
