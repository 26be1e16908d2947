"""An EAGLE drafts for sequences that move from pool to pool, and that lose their blocks and begin again: its own KV
goes with them, and the text is the target's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from services.cli.stack import Stack
from shared.models import DEMO_HEADS, DEMO_TARGET
from tests.support.greedy import Reference, python_prompts, references
from tests.support.pools import SMALL, running_pools
from tests.support.service import generate, inference, running_stack, wait_until_idle, worker_state

pytestmark = pytest.mark.asyncio(loop_scope="module")

NUM_TOKENS = 64
EAGLE = str(DEMO_HEADS / "eagle3")
# Tokens accepted a round in chains of three: where the head's KV of a prompt is missing, or another's, far fewer.
LEAST_ACCEPTED = 1.0


@pytest.fixture(scope="module")
def expected() -> list[Reference]:
    return [each for length in (60, 150) for each in references(DEMO_TARGET, python_prompts(length), 4, NUM_TOKENS)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pools() -> AsyncIterator[Stack]:
    async with running_pools(SMALL, "grpc", draft=None, head=EAGLE) as running:
        yield running
        assert not [line for _, line in running.lines if "KV not fetched" in line]


async def check(stack: Stack, expected: list[Reference], gamma: int | None) -> float:
    """All of them at once; accepted tokens a round."""
    async with inference(stack) as stub:
        answers = await asyncio.gather(
            *(
                generate(stub, each.prompt, gamma=gamma, max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
                for each in expected
            )
        )
    assert [answer.token_ids for answer in answers] == [each.token_ids for each in expected]
    await wait_until_idle(stack)
    num_rounds = sum(answer.usage.rounds for answer in answers)
    return sum(answer.usage.accepted_tokens for answer in answers) / max(1, num_rounds)


@pytest.mark.parametrize("gamma", [3, None])
async def test_from_pool_to_pool(pools: Stack, expected: list[Reference], gamma: int | None) -> None:
    accepted = await check(pools, expected, gamma)
    assert gamma is None or accepted > LEAST_ACCEPTED
    assert (await worker_state(pools, "prefill-0")).cached_blocks > 0


async def test_seeded_sequences_are_the_same_on_pools(pools: Stack, expected: list[Reference]) -> None:
    async with inference(pools) as stub:
        answers = [
            await generate(
                stub,
                expected[-1].prompt,
                gamma=gamma,
                num_nodes=num_nodes,
                n=3,
                seed=4,
                temperature=0.8,
                max_tokens=NUM_TOKENS,
                ignore_eos=True,
            )
            for gamma, num_nodes in ((0, None), (3, None), (3, 10))
        ]
    texts = [[output.token_ids for output in answer.outputs] for answer in answers]
    assert texts[1:] == texts[:1] * 2
    assert len({tuple(each) for each in texts[0]}) == 3
    await wait_until_idle(pools)


async def test_where_blocks_are_few(expected: list[Reference]) -> None:
    """All of them need three times what there is: they are preempted, and begin again, with steps of 40 tokens."""
    small = {"OUTRIDER_TARGET_NUM_BLOCKS": "30", "OUTRIDER_TARGET_MAX_BATCH_TOKENS": "40"}
    async with running_stack({"target-0": small}, draft=None, head=EAGLE) as stack:
        for gamma in (3, None):
            accepted = await check(stack, expected, gamma)
            assert gamma is None or accepted > LEAST_ACCEPTED
