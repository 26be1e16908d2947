"""The services on a CUDA device: text is the target's own, drafted by a worker, inside the target's, or not at all."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
import torch
from outrider.v1 import inference_pb2_grpc
from transformers import AutoModelForCausalLM

from services.cli.stack import Stack
from shared.models import DEMO_TARGET
from tests.support.greedy import python_prompts, references
from tests.support.service import generate, inference, running_stack, wait_until_idle

pytestmark = [pytest.mark.gpu, pytest.mark.asyncio(loop_scope="module")]

NUM_TOKENS = 128
PROMPT_LENGTHS = (12, 60, 150, 320, 700)
PROMPTS_PER_LENGTH = 4
# How far below the likeliest token's logit, by its own forward in float32, one may be that bf16 takes: its eight bits
# of what is some tens large.
_MARGIN = 0.5
_KV = {"OUTRIDER_TARGET_KV_CACHE_GIB": "1", "OUTRIDER_DRAFT_KV_CACHE_GIB": "1"}

PLACES = ("draft worker", "inside")
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {"gamma": 0},
    "chain": {"gamma": 4},
    "tree": {"gamma": 3, "num_nodes": 8},
    "adaptive": {},
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(request: pytest.FixtureRequest) -> AsyncIterator[Stack]:
    """Of the type that the test asks for."""
    settings = {"target-0": _KV, "draft": _KV}
    dtype, where = request.param
    num_drafts = 0 if where == "inside" else 1
    async with running_stack(settings, dtype=dtype, device="cuda", num_drafts=num_drafts) as running:
        said = [line for _, line in running.lines]
        for each in ("layers fused", "steps captured"):
            assert sum(each in line for line in said) == 2, said
        yield running


async def together(
    stub: inference_pb2_grpc.InferenceAsyncStub, prompts: list[list[int]], shape: dict[str, Any], **sampling: Any
) -> list[list[int]]:
    answers = await asyncio.gather(
        *(generate(stub, prompt, max_tokens=NUM_TOKENS, ignore_eos=True, **shape, **sampling) for prompt in prompts)
    )
    if shape.get("gamma"):
        assert sum(answer.usage.accepted_tokens for answer in answers) > 0
    return [answer.token_ids for answer in answers]


@pytest.mark.parametrize(
    "stack", [(dtype, where) for dtype in ("float32", "bfloat16") for where in PLACES], indirect=True
)
async def test_greedy_text_is_transformers_own(stack: Stack) -> None:
    expected = [
        reference
        for length in PROMPT_LENGTHS
        for reference in references(DEMO_TARGET, python_prompts(length), PROMPTS_PER_LENGTH, NUM_TOKENS)
    ]
    prompts = [list(reference.prompt) for reference in expected]
    async with inference(stack) as stub:
        for name, shape in SHAPES.items():
            texts = await together(stub, prompts, shape, temperature=0.0)
            if stack.settings.dtype == "float32":
                assert texts == [reference.token_ids for reference in expected], name
            else:
                for prompt, text in zip(prompts, texts, strict=True):
                    assert below_the_best(prompt, text) <= _MARGIN, name
    await wait_until_idle(stack)


# In bf16 near ties are decided by a step's shape.
@pytest.mark.parametrize("stack", [("float32", where) for where in PLACES], indirect=True)
async def test_seeded_text_is_the_same_whatever_is_drafted(stack: Stack) -> None:
    prompts = python_prompts(60)
    async with inference(stack) as stub:
        texts = [await together(stub, prompts, shape, temperature=1.0, seed=5) for shape in SHAPES.values()]
    assert all(text == texts[0] for text in texts)
    await wait_until_idle(stack)


def below_the_best(prompt: list[int], text: list[int]) -> float:
    """By how much at most a token's logit is below the likeliest one's, where transformers sees the same text."""
    with torch.inference_mode():
        logits = oracle()(input_ids=torch.tensor([[*prompt, *text]])).logits[0, len(prompt) - 1 : -1]
    its = logits.gather(1, torch.tensor(text).unsqueeze(1)).squeeze(1)
    return float((logits.amax(dim=1) - its).max())


@functools.cache
def oracle() -> Any:
    return AutoModelForCausalLM.from_pretrained(DEMO_TARGET, dtype=torch.float32)
