"""Prefill here, decode there: the same tokens as by one worker, with each engine that moves the KV."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from services.cli.stack import Stack
from shared.models import DEMO_TARGET
from tests.support.greedy import Reference, python_prompts, references
from tests.support.pools import LARGE, MIXED, Pools, pools_and_engines, running_pools
from tests.support.service import Generated, generate, inference, running_stack, wait_until_idle, worker_state

pytestmark = pytest.mark.asyncio(loop_scope="module")

NUM_TOKENS = 64
# Shorter than a block, of many blocks, and of more than a step's budget.
LENGTHS = (9, 64, 150, 700)
SEEDED: dict[str, Any] = {"max_tokens": 40, "temperature": 0.9, "seed": 11, "n": 3, "ignore_eos": True}


@pytest.fixture(scope="module")
def expected() -> list[Reference]:
    return [
        reference for length in LENGTHS for reference in references(DEMO_TARGET, python_prompts(length), 3, NUM_TOKENS)
    ]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def seeded(expected: list[Reference]) -> list[list[list[int]]]:
    """What each prompt gives on a single worker without a drafter, by sequence."""
    async with running_stack(draft=None) as alone, inference(alone) as stub:
        return [tokens_of(await generate(stub, each.prompt, **SEEDED)) for each in expected]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=pools_and_engines((LARGE, "nixl"), (MIXED, "grpc")))
async def stack(request: pytest.FixtureRequest) -> AsyncIterator[Stack]:
    """Decode workers take small steps, so that they are slow at prompts and get only the short ones."""
    pools: Pools
    pools, engine = request.param
    async with running_pools(pools, engine) as running:
        yield running
        # Nobody fell back to computing what should have come.
        assert not [line for _, line in running.lines if "KV not fetched" in line]
        prefill = [name for name in running.processes if name.startswith("prefill")]
        assert sum([(await worker_state(running, name)).cached_blocks for name in prefill]) > 0


def tokens_of(answer: Generated) -> list[list[int]]:
    return [each.token_ids for each in answer.outputs]


@pytest.mark.parametrize("gamma", [0, 4, None])
async def test_greedy_is_the_targets_own(stack: Stack, expected: list[Reference], gamma: int | None) -> None:
    async with inference(stack) as stub:
        answers = await asyncio.gather(
            *(
                generate(stub, each.prompt, gamma=gamma, max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
                for each in expected
            )
        )
    assert [answer.token_ids for answer in answers] == [each.token_ids for each in expected]
    await wait_until_idle(stack)


@pytest.mark.parametrize("gamma", [0, 3])
async def test_seeded_sequences_are_those_of_one_worker(
    stack: Stack, expected: list[Reference], seeded: list[list[list[int]]], gamma: int
) -> None:
    async with inference(stack) as stub:
        answers = await asyncio.gather(*(generate(stub, each.prompt, gamma=gamma, **SEEDED) for each in expected))
    assert [tokens_of(answer) for answer in answers] == seeded
    assert all(len({tuple(tokens) for tokens in each}) == 3 for each in seeded)
    await wait_until_idle(stack)


async def test_a_single_token_needs_no_second_worker(stack: Stack, expected: list[Reference]) -> None:
    async with inference(stack) as stub:
        for each in expected:
            answer = await generate(stub, each.prompt, max_tokens=1, temperature=0, ignore_eos=True)
            assert answer.token_ids == each.token_ids[:1]
    await wait_until_idle(stack)
