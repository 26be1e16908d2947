"""Unseeded sampling on pools follows the target's distribution, with a hand-over in every request."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from services.cli.stack import Stack
from shared.policy.pace import LEAST_GRANTED_STEPS
from tests.support.distribution import Filters, exact, least_p_value
from tests.support.models import perturbed, tiny_llama
from tests.support.pools import SMALL, pools_and_engines, running_pools
from tests.support.service import generate, inference, wait_until_idle, worker_state

pytestmark = pytest.mark.asyncio(loop_scope="module")

VOCAB_SIZE = 12
# No token sees further back than twice the window: all prompts that end in SUFFIX are one to the model, and none is
# found in a cache.
WINDOW = 8
NUM_LAYERS = 2
PROMPT_TOKENS = 300
SUFFIX = [5, 3, 11, 7, 2, 9, 1, 8, 4, 10, 6, 3, 7, 1, 5, 2]
NUM_TOKENS = 9
# So many more that there are rounds however long the drafter is thought to take to catch up.
NUM_OUTPUT_TOKENS = NUM_TOKENS + LEAST_GRANTED_STEPS
GAMMA = 3
SEQUENCES_A_REQUEST = 8
NUM_REQUESTS = 70
CONCURRENT_REQUESTS = 2
BLOCK_SIZE = 16
NUM_BLOCKS = NUM_REQUESTS * PROMPT_TOKENS // BLOCK_SIZE + 2048
FILTERS = Filters(1.0, top_k=4)
SIGNIFICANCE = 1e-6


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    assert len(SUFFIX) > NUM_LAYERS * (WINDOW - 1)
    path = tmp_path_factory.mktemp("pair") / "target"
    return tiny_llama(path, vocab_size=VOCAB_SIZE, num_layers=NUM_LAYERS, max_context=1024, sliding_window=WINDOW)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=pools_and_engines((SMALL, "nixl")))
async def stack(request: pytest.FixtureRequest, target: Path) -> AsyncIterator[Stack]:
    pools, engine = request.param
    draft = perturbed(target, target.parent / "draft", noise=0.1)
    async with running_pools(pools, engine, target=str(target), draft=str(draft)) as running:
        yield running


async def test_samples_follow_the_target(stack: Stack, target: Path) -> None:
    dice = random.Random(1)
    places = asyncio.Semaphore(CONCURRENT_REQUESTS)

    async def draw() -> tuple[list[list[int]], int]:
        beginning = [dice.randrange(1, VOCAB_SIZE) for _ in range(PROMPT_TOKENS - len(SUFFIX))]
        async with places:
            answer = await generate(
                stub,
                [*beginning, *SUFFIX],
                gamma=GAMMA,
                n=SEQUENCES_A_REQUEST,
                max_tokens=NUM_OUTPUT_TOKENS,
                ignore_eos=True,
                **FILTERS.fields(),
            )
        return [output.token_ids for output in answer.outputs], answer.usage.accepted_tokens

    async with inference(stack) as stub:
        drawn = await asyncio.gather(*(draw() for _ in range(NUM_REQUESTS)))
    samples = np.array([tokens for some, _ in drawn for tokens in some])
    assert samples.shape == (NUM_REQUESTS * SEQUENCES_A_REQUEST, NUM_OUTPUT_TOKENS)
    assert least_p_value(samples, exact(target, SUFFIX, NUM_TOKENS, FILTERS)) > SIGNIFICANCE
    # A proposal may come too late: its sequence goes on without.
    assert sum(num_accepted for _, num_accepted in drawn) > 0
    await wait_until_idle(stack)
    # What did not look better elsewhere, by how long steps happen to take, was prefilled where that is done.
    states = {name: await worker_state(stack, name) for name in stack.processes if name.startswith("prefill")}
    full = sum(state.cached_blocks for state in states.values())
    assert full > 0.1 * NUM_REQUESTS * PROMPT_TOKENS // BLOCK_SIZE or "target-0" in stack.processes
    assert not [line for _, line in stack.lines if "KV not fetched" in line]
