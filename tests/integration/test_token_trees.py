"""Drafts as trees, through the service: the target's own text, whatever their shape and whoever dies meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import pytest_asyncio

from services.cli.stack import Stack
from shared.models import DEMO_TARGET
from tests.support.distribution import Filters, exact, least_p_value
from tests.support.greedy import Reference, python_prompts, references
from tests.support.models import perturbed, tiny_llama
from tests.support.service import MODEL_ALONE, Generated, generate, inference, running_stack, wait_until_idle

pytestmark = pytest.mark.asyncio(loop_scope="module")

NUM_TOKENS = 64
PROMPT = "def quicksort(items: list[int]) -> list[int]:\n    "
# Steps of the drafter, and tokens of a tree.
SHAPES = [(1, 4), (3, 8), (4, 12), (8, 40)]
RESTART_SECONDS = 60
# Chunks of a stream that have come when a process is killed: far from its end.
HALFWAY_CHUNKS = 15


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack() -> AsyncIterator[Stack]:
    async with running_stack({"draft": MODEL_ALONE}) as running:
        yield running


@pytest.fixture(scope="module")
def demo_references() -> list[Reference]:
    return [
        reference
        for length in (12, 150, 320)
        for reference in references(DEMO_TARGET, python_prompts(length), 3, NUM_TOKENS)
    ]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
async def test_greedy_text_is_the_targets_own(
    stack: Stack, demo_references: list[Reference], shape: tuple[int, int]
) -> None:
    gamma, num_nodes = shape

    async def check(stub: Any, reference: Reference) -> Generated:
        answer = await generate(
            stub, reference.prompt, gamma=gamma, num_nodes=num_nodes, max_tokens=NUM_TOKENS, temperature=0,
            ignore_eos=True, include_draft_tokens=True,
        )  # fmt: skip
        assert answer.token_ids == reference.token_ids
        return answer

    async with inference(stack) as stub:
        answers = await asyncio.gather(*(check(stub, reference) for reference in demo_references))
    for answer in answers:
        usage = answer.usage
        # Near the end of a text fewer steps may find less.
        assert num_nodes * (usage.rounds - 3) < usage.draft_tokens <= num_nodes * usage.rounds
        assert 1 <= len(usage.acceptance_by_position) <= gamma
        # Of several that may be next one is more often right than the best alone is.
        assert usage.accepted_tokens > 0.4 * usage.rounds
    await wait_until_idle(stack)


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.8, "top_p": 0.95, "seed": 20},
        {"temperature": 1.0, "seed": 21, "repetition_penalty": 1.2, "frequency_penalty": 0.2, "min_tokens": 40},
        {"temperature": 0.0, "repetition_penalty": 1.3, "logprobs": 2},
        {"temperature": 0.9, "seed": 22, "n": 3},
    ],
    ids=["seeded", "penalties", "greedy with penalties", "n = 3"],
)
async def test_coupled_text_is_the_same_with_any_tree(stack: Stack, fields: dict[str, Any]) -> None:
    async with inference(stack) as stub:
        plain = await generate(stub, PROMPT, gamma=0, max_tokens=NUM_TOKENS, **fields)
        for gamma, num_nodes in SHAPES:
            drafted = await generate(stub, PROMPT, gamma=gamma, num_nodes=num_nodes, max_tokens=NUM_TOKENS, **fields)
            assert [each.token_ids for each in drafted.outputs] == [each.token_ids for each in plain.outputs]
            assert drafted.usage.accepted_tokens > 0
    await wait_until_idle(stack)


@pytest.mark.parametrize("victim", ["draft", "target-0"])
async def test_who_dies_halfway_changes_no_token(stack: Stack, victim: str) -> None:
    fields: dict[str, Any] = {"max_tokens": 200, "temperature": 0.8, "seed": 23, "ignore_eos": True}
    async with inference(stack) as stub:
        plain = await generate(stub, PROMPT, gamma=0, **fields)
        restarts, chunks = stack.processes[victim].restarts, 0

        def kill(_: Any) -> None:
            nonlocal chunks
            chunks += 1
            if chunks == HALFWAY_CHUNKS:
                stack.kill(victim)

        drafted = await generate(stub, PROMPT, gamma=3, num_nodes=10, on_chunk=kill, **fields)
        assert drafted.token_ids == plain.token_ids
        assert chunks > HALFWAY_CHUNKS
        async with asyncio.timeout(RESTART_SECONDS):
            await stack.processes[victim].ready.wait()
        assert stack.processes[victim].restarts == restarts + 1
    await wait_until_idle(stack)


async def test_unseeded_samples_follow_the_target(tmp_path: Path) -> None:
    target = tiny_llama(tmp_path / "target", vocab_size=12)
    draft = perturbed(target, tmp_path / "draft", noise=0.3)
    prompt, filters, num_tokens, places = (5, 3, 11, 7), Filters(1.0, top_k=8), 5, asyncio.Semaphore(16)
    environment = {"draft": MODEL_ALONE}
    async with running_stack(environment, target=str(target), draft=str(draft)) as running, inference(running) as stub:

        async def draw() -> Generated:
            async with places:
                return await generate(
                    stub, prompt, gamma=3, num_nodes=9, n=16, max_tokens=num_tokens, ignore_eos=True,
                    **filters.fields(),
                )  # fmt: skip

        answers = await asyncio.gather(*(draw() for _ in range(100)))
        await wait_until_idle(running)
    samples = np.array([output.token_ids for answer in answers for output in answer.outputs])
    assert samples.shape == (100 * 16, num_tokens)
    assert sum(answer.usage.accepted_tokens for answer in answers) > 0.5 * sum(
        answer.usage.rounds for answer in answers
    )
    # Requests without a seed do not repeat one another.
    assert len(np.unique(samples, axis=0)) > 200
    assert least_p_value(samples, exact(target, prompt, num_tokens, filters)) > 1e-6


@pytest.mark.parametrize(("gamma", "num_nodes"), [(None, 4), (4, 4), (4, 65), (0, 4)])
async def test_what_is_no_trees_size_is_named(stack: Stack, gamma: int | None, num_nodes: int) -> None:
    async with inference(stack) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await generate(stub, PROMPT, gamma=gamma, num_nodes=num_nodes)
    assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "speculation.num_nodes" in str(error.value.details())
