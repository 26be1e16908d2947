"""Unseeded sampling follows the target's distribution, measured at the wire against the target's own logits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
import torch
from numpy.typing import NDArray
from outrider.v1 import inference_pb2_grpc
from transformers import (
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from services.cli.stack import Stack
from tests.support.distribution import Filters, exact, least_p_value
from tests.support.models import perturbed, tiny_llama
from tests.support.service import MODEL_ALONE, generate, inference, running_stack, wait_until_idle

pytestmark = pytest.mark.asyncio(loop_scope="module")

VOCAB_SIZE = 12
PROMPT = (5, 3, 11, 7)
# One drawn at the prefill, then a whole round: three drafted or recovered, and a bonus.
NUM_TOKENS = 5
GAMMA = 3
SEQUENCES_A_REQUEST = 16
# Of NUM_TOKENS - 1 tokens that rounds drew: some 7,000 samples a case.
NUM_SEQUENCES = 110 * SEQUENCES_A_REQUEST
CONCURRENT_REQUESTS = 16
# With 36 statistics in all, one run in some 30,000 raises a false alarm.
SIGNIFICANCE = 1e-6

CASES = (Filters(0.7), Filters(1.0, top_k=6), Filters(1.5, top_p=0.8))
# How a drafter's weights differ from the target's, and what share of its tokens may then be kept.
DRAFTERS = {"well": (0.6, 1.0), "badly": (0.03, 0.5), "never": (0.0, 0.02)}

# Those that the suite has time for: each of the filters, and who agrees with nothing.
SHORT = (("well", CASES[0]), ("well", CASES[1]), ("never", CASES[2]))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("pair") / "target", vocab_size=VOCAB_SIZE)


def drafter(agrees: str, target: Path) -> Path:
    """A drafter that agrees with the target well, badly, or never: it likes best what the target likes least."""
    path = target.parent / agrees
    if agrees == "well":
        return perturbed(target, path, noise=0.1)
    if agrees == "badly":
        return perturbed(target, path, noise=1.0)
    model = LlamaForCausalLM.from_pretrained(target)
    with torch.no_grad():
        model.lm_head.weight.mul_(-3)
    model.save_pretrained(path)
    PreTrainedTokenizerFast.from_pretrained(target).save_pretrained(path)
    return path


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(request: pytest.FixtureRequest, target: Path) -> AsyncIterator[tuple[str, Stack]]:
    agrees: str = request.param
    environment = {"draft": MODEL_ALONE}
    async with running_stack(environment, target=str(target), draft=str(drafter(agrees, target))) as running:
        yield agrees, running


async def draw(stub: inference_pb2_grpc.InferenceAsyncStub, filters: Filters) -> tuple[NDArray[np.int64], float]:
    """NUM_SEQUENCES sequences `[N, NUM_TOKENS]`, and the share of draft tokens that was kept."""
    places = asyncio.Semaphore(CONCURRENT_REQUESTS)

    async def draw_some() -> tuple[list[list[int]], int, int]:
        async with places:
            answer = await generate(
                stub,
                PROMPT,
                gamma=GAMMA,
                n=SEQUENCES_A_REQUEST,
                max_tokens=NUM_TOKENS,
                ignore_eos=True,
                **filters.fields(),
            )
        tokens = [output.token_ids for output in answer.outputs]
        return tokens, answer.usage.draft_tokens, answer.usage.accepted_tokens

    drawn = await asyncio.gather(*(draw_some() for _ in range(NUM_SEQUENCES // SEQUENCES_A_REQUEST)))
    samples = np.array([tokens for some, _, _ in drawn for tokens in some])
    assert samples.shape == (NUM_SEQUENCES, NUM_TOKENS)
    return samples, sum(accepted for _, _, accepted in drawn) / sum(drafted for _, drafted, _ in drawn)


@pytest.mark.parametrize(
    ("pair", "filters"),
    [
        pytest.param(
            agrees, filters, id=f"{agrees}-{filters}", marks=() if (agrees, filters) in SHORT else pytest.mark.long
        )
        for agrees in DRAFTERS
        for filters in CASES
    ],
    indirect=["pair"],
)
async def test_samples_follow_the_target(pair: tuple[str, Stack], target: Path, filters: Filters) -> None:
    agrees, stack = pair
    async with inference(stack) as stub:
        samples, share_kept = await draw(stub, filters)
    least, most = DRAFTERS[agrees]
    assert least <= share_kept <= most
    assert least_p_value(samples, exact(target, PROMPT, NUM_TOKENS, filters)) > SIGNIFICANCE
    await wait_until_idle(stack)
