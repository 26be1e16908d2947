"""A served target worker whose KV cache is too small for its prompts, and whose host memory is not."""

from __future__ import annotations

from shared.models import DEMO_TARGET
from tests.support.greedy import python_prompts, references
from tests.support.service import generate, inference, running_stack, wait_until_idle, worker_state

NUM_TOKENS = 8
LENGTH = 200
NUM_PROMPTS = 4


async def test_prompts_that_were_evicted_are_not_computed_again() -> None:
    expected = references(DEMO_TARGET, python_prompts(LENGTH), NUM_PROMPTS, NUM_TOKENS)
    small = {"OUTRIDER_TARGET_NUM_BLOCKS": "20", "OUTRIDER_TARGET_HOST_CACHE_GIB": "0.1"}
    async with running_stack({"target-0": small}, draft=None) as stack, inference(stack) as stub:
        for turn in range(2):
            for each in expected:
                answer = await generate(stub, each.prompt, max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
                assert answer.token_ids == each.token_ids
                if turn:
                    assert answer.usage.cached_tokens == (len(each.prompt) - 1) // 16 * 16
        state = await worker_state(stack, "target-0")
        assert state.restored_blocks > NUM_PROMPTS * (LENGTH // 16 - 1)
        assert state.host_blocks > state.total_blocks
        await wait_until_idle(stack)
