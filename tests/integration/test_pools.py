"""Prefill here, decode there: the same tokens as by one worker, with each engine that moves the KV."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from services.cli.stack import Stack
from shared.models import DEMO_TARGET
from shared.transfer.nixl import nixl_available
from tests.support.greedy import Reference, python_prompts, references
from tests.support.service import generate, inference, running_stack, wait_until_idle, worker_state

pytestmark = pytest.mark.asyncio(loop_scope="module")

NUM_TOKENS = 64
ENGINES = [
    "grpc",
    pytest.param("nixl", marks=pytest.mark.skipif(not nixl_available(), reason="nixl is not installed")),
]


@pytest.fixture(scope="module")
def expected() -> list[Reference]:
    """Shorter than a block, of many blocks, and of more than a step's budget."""
    return [
        reference
        for length in (9, 64, 150, 700)
        for reference in references(DEMO_TARGET, python_prompts(length), 3, NUM_TOKENS)
    ]


# Prefill and decode workers.
POOLS = [(1, 1), (2, 2)]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=ENGINES)
async def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=POOLS, ids=str)
async def stack(request: pytest.FixtureRequest, engine: str) -> AsyncIterator[Stack]:
    """Decode workers take small steps, so that they are slow at prompts and get only the short ones."""
    num_prefill, num_decode = request.param
    environment = {f"prefill-{i}": {"OUTRIDER_TARGET_KV_TRANSFER": engine} for i in range(num_prefill)}
    for i in range(num_decode):
        environment[f"decode-{i}"] = {
            "OUTRIDER_TARGET_KV_TRANSFER": engine,
            "OUTRIDER_TARGET_MAX_BATCH_TOKENS": "32",
        }
    async with running_stack(environment, num_prefill=num_prefill, num_decode=num_decode) as running:
        yield running
        # Nobody fell back to computing what should have come.
        assert not [line for _, line in running.lines if "KV not fetched" in line]
        assert sum([(await worker_state(running, f"prefill-{i}")).cached_blocks for i in range(num_prefill)]) > 0


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


async def test_several_sequences_of_one_prompt(stack: Stack, expected: list[Reference]) -> None:
    prompt = expected[-1].prompt
    fields: dict[str, Any] = {"max_tokens": 40, "temperature": 0.9, "seed": 11, "n": 3, "ignore_eos": True}
    async with inference(stack) as stub:
        together = await generate(stub, prompt, gamma=3, **fields)
        plain = await generate(stub, prompt, gamma=0, **fields)
    assert [each.token_ids for each in together.outputs] == [each.token_ids for each in plain.outputs]
    assert len({tuple(each.token_ids) for each in together.outputs}) == 3
    await wait_until_idle(stack)


async def test_a_single_token_needs_no_second_worker(stack: Stack, expected: list[Reference]) -> None:
    async with inference(stack) as stub:
        for each in expected:
            answer = await generate(stub, each.prompt, max_tokens=1, temperature=0, ignore_eos=True)
            assert answer.token_ids == each.token_ids[:1]
    await wait_until_idle(stack)
