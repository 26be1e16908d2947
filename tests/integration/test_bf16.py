"""In bf16, too, a request gives the same tokens whatever is drafted and whatever it is batched with: by kernels of our
own, whose logits do not depend on that to the bit."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from outrider.v1 import inference_pb2_grpc

from services.cli.stack import Stack
from tests.support.greedy import python_prompts
from tests.support.kernels import kernels
from tests.support.service import generate, inference, running_stack, wait_until_idle

pytestmark = pytest.mark.asyncio(loop_scope="module")

NUM_TOKENS = 100
PROMPT_LENGTHS = (12, 60, 150, 600)
NUM_PROMPTS = 8
# Greedy, and seeded at a temperature that leaves near ties.
SAMPLING: tuple[dict[str, Any], ...] = ({"temperature": 0.0}, {"temperature": 1.0, "seed": 5})


# Both models as they are; or the target's weights rounded a little, and the draft's more.
QUANTIZE: tuple[dict[str, dict[str, str]], ...] = (
    {},
    {"target-0": {"OUTRIDER_TARGET_QUANTIZE": "int8"}, "draft": {"OUTRIDER_DRAFT_QUANTIZE": "int4"}},
)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=QUANTIZE, ids=["bf16", "quantised"])
async def stack(request: pytest.FixtureRequest) -> AsyncIterator[Stack]:
    kernels("avx2")
    # Prompts in chunks, beside others' rounds; two threads, where there were one.
    chunked = {"OUTRIDER_TARGET_MAX_BATCH_TOKENS": "100"}
    settings = request.param | {"target-0": chunked | request.param.get("target-0", {})}
    async with running_stack(settings, dtype="bfloat16", num_threads=2) as running:
        yield running


async def tokens(stub: inference_pb2_grpc.InferenceAsyncStub, case: int, gamma: int | None) -> list[int]:
    turn = case // len(PROMPT_LENGTHS)
    prompt = python_prompts(PROMPT_LENGTHS[case % len(PROMPT_LENGTHS)])[turn]
    sampling = SAMPLING[turn % len(SAMPLING)]
    answer = await generate(stub, prompt, gamma=gamma, max_tokens=NUM_TOKENS, ignore_eos=True, **sampling)
    assert bool(answer.usage.draft_tokens) == bool(gamma)
    return answer.token_ids


async def test_drafts_and_company_change_no_token(stack: Stack) -> None:
    async with inference(stack) as stub:
        alone = [await tokens(stub, case, 0) for case in range(NUM_PROMPTS)]
        for gamma in (4, 0):
            together = await asyncio.gather(*(tokens(stub, case, gamma) for case in range(NUM_PROMPTS)))
            assert together == alone
    await wait_until_idle(stack)
