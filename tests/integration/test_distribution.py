"""Unseeded sampling follows the target's distribution, measured at the wire against the target's own logits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from numpy.typing import NDArray
from outrider.v1 import inference_pb2_grpc
from scipy.stats import chi2
from transformers import (
    LlamaForCausalLM,
    LogitsProcessorList,
    PreTrainedTokenizerFast,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from services.cli.stack import Stack
from tests.support.models import perturbed, tiny_llama
from tests.support.service import generate, inference, running_stack, wait_until_idle

pytestmark = pytest.mark.asyncio(loop_scope="module")

VOCAB_SIZE = 12
PROMPT = (5, 3, 11, 7)
# One drawn at the prefill, then a whole round: three drafted or recovered, and a bonus.
NUM_TOKENS = 5
GAMMA = 3
SEQUENCES_A_REQUEST = 16
# Of NUM_TOKENS - 1 tokens that rounds drew: some 10,000 samples a case, 30,000 a drafter.
NUM_SEQUENCES = 157 * SEQUENCES_A_REQUEST
CONCURRENT_REQUESTS = 16
# Below which a cell's count is not near enough to normal: such cells are counted together.
LEAST_EXPECTED = 10.0
# With 36 statistics in all, one run in some 30,000 raises a false alarm.
SIGNIFICANCE = 1e-6

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Filters:
    """A request's sampling filters."""

    temperature: float
    top_k: int = 0
    top_p: float = 1.0

    def fields(self) -> dict[str, Any]:
        return {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}

    def warpers(self) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        """The same as transformers has them: token ids and logits in, logits out."""
        warpers: Any = LogitsProcessorList([TemperatureLogitsWarper(self.temperature)])
        if self.top_k:
            warpers.append(TopKLogitsWarper(self.top_k))
        if self.top_p < 1:
            warpers.append(TopPLogitsWarper(self.top_p))
        return warpers  # type: ignore[no-any-return]


CASES = (Filters(0.7), Filters(1.0, top_k=6), Filters(1.5, top_p=0.8))
# How a drafter's weights differ from the target's, and what share of its tokens may then be kept.
DRAFTERS = {"well": (0.6, 1.0), "badly": (0.03, 0.5), "never": (0.0, 0.02)}


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


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=list(DRAFTERS))
async def pair(request: pytest.FixtureRequest, target: Path) -> AsyncIterator[tuple[str, Stack]]:
    agrees: str = request.param
    async with running_stack(target=str(target), draft=str(drafter(agrees, target))) as running:
        yield agrees, running


def exact(target: Path, filters: Filters) -> list[Array]:
    """P(t1, t2), P(t2, t3), ..., each [V, V]: what precedes the two tokens is summed over."""
    model = LlamaForCausalLM.from_pretrained(target, dtype=torch.float32, attn_implementation="eager")
    paths, weights = torch.tensor([PROMPT]), torch.ones(1, dtype=torch.float64)
    pairs: list[Array] = []
    for position in range(NUM_TOKENS):
        with torch.inference_mode():
            logits = torch.cat(
                [model(input_ids=part, use_cache=False).logits[:, -1] for part in torch.split(paths, 4096)]
            )
            conditional = filters.warpers()(paths, logits).double().softmax(-1)
        joint = weights[:, None] * conditional
        if position > 0:
            pairs.append(joint.reshape(-1, VOCAB_SIZE, VOCAB_SIZE).sum(0).numpy())
        tokens = torch.arange(VOCAB_SIZE).repeat(len(paths))[:, None]
        paths = torch.cat([paths.repeat_interleave(VOCAB_SIZE, 0), tokens], 1)
        weights = joint.flatten()
    return pairs


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


def p_value(observed: Array, probabilities: Array) -> float:
    """Pearson's chi-square test; cells that expect too little are counted as one."""
    expected = probabilities * observed.sum()
    assert not observed[probabilities == 0].any(), "a token came that the filters exclude"
    small = expected < LEAST_EXPECTED
    observed = np.append(observed[~small], observed[small].sum())
    expected = np.append(expected[~small], expected[small].sum())
    if expected[-1] < LEAST_EXPECTED:
        # Too little even together: the likeliest cell can take it.
        likeliest = int(expected[:-1].argmax())
        observed[likeliest] += observed[-1]
        expected[likeliest] += expected[-1]
        observed, expected = observed[:-1], expected[:-1]
    statistic = ((observed - expected) ** 2 / expected).sum()
    return float(chi2.sf(statistic, len(expected) - 1))


@pytest.mark.parametrize("filters", CASES, ids=str)
async def test_samples_follow_the_target(pair: tuple[str, Stack], target: Path, filters: Filters) -> None:
    agrees, stack = pair
    async with inference(stack) as stub:
        samples, share_kept = await draw(stub, filters)
    least, most = DRAFTERS[agrees]
    assert least <= share_kept <= most
    for position, probabilities in enumerate(exact(target, filters)):
        counts = np.zeros((VOCAB_SIZE, VOCAB_SIZE))
        np.add.at(counts, (samples[:, position], samples[:, position + 1]), 1)
        assert p_value(counts, probabilities) > SIGNIFICANCE, f"tokens {position + 1} and {position + 2}"
    await wait_until_idle(stack)
