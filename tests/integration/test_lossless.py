"""Greedy output through the service is the target's own, whatever is drafted, batched, chunked, preempted or cached."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from _pytest.mark import ParameterSet
from outrider.v1 import inference_pb2, inference_pb2_grpc

from services.cli.stack import Stack
from shared.models import DEMO_TARGET
from tests.support.families import VOCAB_SIZE, tiny_checkpoint
from tests.support.greedy import Reference, python_prompts, references
from tests.support.service import MODEL_ALONE, generate, inference, refused_start, running_stack, wait_until_idle

on_module_loop = pytest.mark.asyncio(loop_scope="module")

NUM_TOKENS = 128
PROMPT_LENGTHS = (12, 60, 150, 320, 700)
PROMPTS_PER_LENGTH = 4
NUM_CONCURRENT = 16
BLOCK_SIZE = 16
GAMMAS = (0, 1, 4, 8, None)
SMALL_BLOCKS = 64


def _long(*cases: Any) -> list[ParameterSet]:
    """Cases that the suite has no time for."""
    return [pytest.param(case, marks=pytest.mark.long) for case in cases]


@pytest.fixture(scope="module")
def demo_references() -> list[Reference]:
    """20 prompts, shortest first: the longest is more than a step's budget of 512 tokens."""
    return [
        reference
        for length in PROMPT_LENGTHS
        for reference in references(DEMO_TARGET, python_prompts(length), PROMPTS_PER_LENGTH, NUM_TOKENS)
    ]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack() -> AsyncIterator[Stack]:
    """Every case is a tenant of its own, so that each begins with no cached prefix."""
    keys = [f"{case}={case}-key" for case in ("cached", *(f"{kind}-{gamma}" for kind in _KINDS for gamma in GAMMAS))]
    async with running_stack({"router": {"OUTRIDER_ROUTER_API_KEYS": ",".join(keys)}}) as running:
        yield running


_KINDS = ("alone", "together")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def small_stack() -> AsyncIterator[Stack]:
    """Steps of 17 tokens, and a pool that holds little more than the longest sequence."""
    small = {"OUTRIDER_TARGET_MAX_BATCH_TOKENS": "17", "OUTRIDER_TARGET_NUM_BLOCKS": str(SMALL_BLOCKS)}
    async with running_stack({"target-0": small, "draft": MODEL_ALONE}) as running:
        yield running


@dataclass
class Residency:
    """Blocks that the sequences which have begun and not ended would need to be resident all at once."""

    peak: int = 0
    _lengths: dict[int, int] = field(default_factory=dict)

    def saw(self, key: int, num_prompt_tokens: int, chunk: inference_pb2.GenerateResponse) -> None:
        self._lengths[key] = self._lengths.get(key, num_prompt_tokens) + len(chunk.token_ids)
        if chunk.finish_reason:
            del self._lengths[key]
        # The newest token's KV is not computed yet.
        self.peak = max(self.peak, sum(-(-(length - 1) // BLOCK_SIZE) for length in self._lengths.values()))


async def check(
    stub: inference_pb2_grpc.InferenceAsyncStub,
    expected: Sequence[Reference],
    gamma: int | None,
    num_concurrent: int,
    api_key: str | None = None,
) -> tuple[list[inference_pb2.Usage], Residency]:
    """Generates from every prompt, `num_concurrent` at a time, and compares; returns each one's usage."""
    places = asyncio.Semaphore(num_concurrent)
    residency = Residency()

    async def check_one(key: int, reference: Reference) -> inference_pb2.Usage:
        async with places:
            answer = await generate(
                stub,
                reference.prompt,
                gamma=gamma,
                api_key=api_key,
                on_chunk=lambda chunk: residency.saw(key, len(reference.prompt), chunk),
                max_tokens=NUM_TOKENS,
                temperature=0,
                ignore_eos=True,
            )
        assert answer.token_ids == reference.token_ids
        assert answer.outputs[0].finish_reason == inference_pb2.FINISH_REASON_LENGTH
        assert answer.usage.output_tokens == NUM_TOKENS
        return answer.usage

    usages = await asyncio.gather(*(check_one(key, reference) for key, reference in enumerate(expected)))
    if gamma == 0:
        assert not any(usage.draft_tokens for usage in usages)
    elif gamma is not None:
        assert all(usage.accepted_tokens > 0 for usage in usages)
        # Nor were they drafted less, but at the end: position i of the draft is there in all rounds but the last i.
        assert all(usage.acceptance_by_position[-1].drafted >= usage.rounds - gamma for usage in usages)
    return usages, residency


@on_module_loop
@pytest.mark.parametrize("gamma", GAMMAS)
async def test_one_stream_is_the_targets_own(stack: Stack, demo_references: list[Reference], gamma: int | None) -> None:
    # Every γ meets every prompt length, and every prompt is once alone.
    expected = demo_references[GAMMAS.index(gamma) :: len(GAMMAS)]
    async with inference(stack) as stub:
        usages, _ = await check(stub, expected, gamma, 1, f"alone-{gamma}-key")
    assert not any(usage.cached_tokens for usage in usages)
    await wait_until_idle(stack)


@on_module_loop
@pytest.mark.parametrize("gamma", [0, 4, None, *_long(1, 8)])
async def test_concurrent_streams_are_the_targets_own(
    stack: Stack, demo_references: list[Reference], gamma: int | None
) -> None:
    async with inference(stack) as stub:
        usages, _ = await check(stub, demo_references, gamma, NUM_CONCURRENT, f"together-{gamma}-key")
    assert not any(usage.cached_tokens for usage in usages)
    await wait_until_idle(stack)


@on_module_loop
@pytest.mark.parametrize("gamma", [4, *_long(0)])
async def test_a_prefix_hit_changes_nothing(stack: Stack, demo_references: list[Reference], gamma: int) -> None:
    async with inference(stack) as stub:
        await check(stub, demo_references, gamma, NUM_CONCURRENT, "cached-key")
        usages, _ = await check(stub, demo_references, gamma, NUM_CONCURRENT, "cached-key")
    for reference, usage in zip(demo_references, usages, strict=True):
        # All full blocks before the last token, whose logits are always computed.
        assert usage.cached_tokens == (len(reference.prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE
    await wait_until_idle(stack)


@on_module_loop
@pytest.mark.parametrize("gamma", [4, *_long(0, None)])
async def test_small_chunks_and_preemption_change_nothing(
    small_stack: Stack, demo_references: list[Reference], gamma: int | None
) -> None:
    # Longest first: their blocks are what the others wait for.
    expected = demo_references[::-1]
    async with inference(small_stack) as stub:
        # How many go on at once is the machine's affair: each time all must be equal, and once the pool too small.
        for _ in range(4):
            _, residency = await check(stub, expected, gamma, NUM_CONCURRENT)
            if residency.peak > SMALL_BLOCKS:
                break
    # More sequences had begun, and would go on, than the pool can hold: some had lost their blocks meanwhile.
    assert residency.peak > SMALL_BLOCKS
    await wait_until_idle(small_stack)


# What the engine makes of every family is for test_models; here two of those that differ most go through the service.
@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", *_long("qwen3", "mistral", "gpt2")])
async def test_families(family: str, tmp_path: Path) -> None:
    target = tiny_checkpoint(family, tmp_path / "target")
    draft = tiny_checkpoint(family, tmp_path / "draft", noise=0.1)
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(1, VOCAB_SIZE, (40,), generator=generator).tolist() for _ in range(12)]
    expected = references(target, prompts, 4, 32)
    async with running_stack(target=str(target), draft=str(draft)) as stack, inference(stack) as stub:
        for reference in expected:
            greedy = await generate(stub, reference.prompt, gamma=4, max_tokens=32, temperature=0, ignore_eos=True)
            assert greedy.token_ids == reference.token_ids
            assert greedy.usage.accepted_tokens > 0
        for seed, reference in enumerate(expected):
            plain, drafted = [
                await generate(stub, reference.prompt, gamma=gamma, max_tokens=32, seed=seed, ignore_eos=True)
                for gamma in (0, 4)
            ]
            assert drafted.token_ids == plain.token_ids
            assert drafted.usage.draft_tokens > 0
            assert plain.usage.draft_tokens == 0
        await wait_until_idle(stack)


@pytest.mark.parametrize("family", ["mamba", "minimax"])
async def test_models_with_other_state_are_refused_at_start(family: str, tmp_path: Path) -> None:
    model = tiny_checkpoint(family, tmp_path / family)
    lines = await refused_start("target", f"--model={model}", "--dtype=float32")
    complaints = [line for line in lines if line.startswith("outrider:")]
    assert len(complaints) == 1
    assert re.match(rf"outrider: model {family} cannot be served: .{{20}}", complaints[0])
    # The rest is the structured log: no traceback.
    assert [line for line in lines if not line.startswith(("outrider:", "{", "[transformers]"))] == []
