"""Drafts copied from prompts and outputs, through the service: the target's own text, with a draft model or without."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from services.cli.stack import Stack
from shared.models import DEMO_DRAFT, DEMO_TARGET
from tests.support.distribution import Filters, exact, least_p_value
from tests.support.greedy import Reference, python_prompts, references
from tests.support.models import tiny_llama
from tests.support.service import Generated, generate, inference, refused_start, running_stack, wait_until_idle

pytestmark = pytest.mark.asyncio(loop_scope="module")

NUM_TOKENS = 64
RESTART_SECONDS = 60
# Chunks of a stream that have come when a process is killed: far from its end.
HALFWAY_CHUNKS = 8
# Number of draft tokens, and of a tree's.
SHAPES: list[tuple[int | None, int | None]] = [(1, None), (8, None), (None, None), (3, 16)]


# By a draft worker, without a model and with one; by the target itself.
IN_TARGET = {"OUTRIDER_TARGET_COPIED_TOKENS": "100000"}
PLACES: dict[str, dict[str, Any]] = {
    "alone": {"draft": "none"},
    "beside": {"draft": str(DEMO_DRAFT)},
    "in the target": {"draft": None, "environment": {"target-0": IN_TARGET}},
}


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=PLACES)
async def stack(request: pytest.FixtureRequest) -> AsyncIterator[Stack]:
    async with running_stack(**PLACES[request.param]) as running:
        yield running


@pytest.fixture(scope="module")
def repetitive() -> list[Reference]:
    """Prompts that begin again with what they began with."""
    prompts = [prompt[:120] + prompt[:40] for prompt in python_prompts(120)]
    return references(DEMO_TARGET, prompts, 4, NUM_TOKENS)


@pytest.fixture(scope="module")
def plain(repetitive: list[Reference]) -> dict[str, Any]:
    """A seeded request; two sequences that its prompt gives are held to be the same however they are drafted."""
    return {
        "prompt": repetitive[0].prompt, "max_tokens": NUM_TOKENS, "temperature": 0.4, "seed": 5, "n": 2,
        "frequency_penalty": 0.1, "ignore_eos": True,
    }  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=str)
async def test_greedy_text_is_the_targets_own(
    stack: Stack, repetitive: list[Reference], shape: tuple[int | None, int | None]
) -> None:
    gamma, num_nodes = shape

    async def check(stub: Any, reference: Reference) -> Generated:
        answer = await generate(
            stub, reference.prompt, gamma=gamma, num_nodes=num_nodes, max_tokens=NUM_TOKENS, temperature=0,
            ignore_eos=True,
        )  # fmt: skip
        assert answer.token_ids == reference.token_ids
        return answer

    async with inference(stack) as stub:
        answers = await asyncio.gather(*(check(stub, reference) for reference in repetitive))
        answers.append(await check(stub, repetitive[0]))
    if gamma is not None:
        assert sum(answer.usage.accepted_tokens for answer in answers) > 0
    if gamma == 8:
        # The last one was generated before: hardly anything is left to the target.
        assert answers[-1].usage.accepted_tokens > 0.7 * NUM_TOKENS
    await wait_until_idle(stack)


async def test_seeded_text_is_the_same_with_and_without(stack: Stack, plain: dict[str, Any]) -> None:
    async with inference(stack) as stub:
        texts = [
            [output.token_ids for output in (await generate(stub, gamma=gamma, num_nodes=nodes, **plain)).outputs]
            for gamma, nodes in ((0, None), *SHAPES)
        ]
    assert all(each == texts[0] for each in texts[1:])
    await wait_until_idle(stack)


@pytest.mark.parametrize("name", ["draft", "target-0"])
async def test_who_dies_halfway_changes_no_token(stack: Stack, repetitive: list[Reference], name: str) -> None:
    if name not in stack.processes:
        pytest.skip("there is no draft worker")
    reference, num_chunks = repetitive[1], 0

    def on_chunk(_: object) -> None:
        nonlocal num_chunks
        num_chunks += 1
        if num_chunks == HALFWAY_CHUNKS:
            stack.kill(name)

    async with inference(stack) as stub:
        answer = await generate(
            stub, reference.prompt, gamma=2, max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True, on_chunk=on_chunk
        )
    assert answer.token_ids == reference.token_ids
    async with asyncio.timeout(RESTART_SECONDS):
        await stack.processes[name].ready.wait()
    await wait_until_idle(stack)


@pytest.mark.parametrize("where", ["alone", "in the target"])
async def test_unseeded_samples_follow_the_target(where: str, tmp_path: Path) -> None:
    """What is copied is certain of itself, and often wrong: by rejection sampling, and in trees by coupled noise."""
    target = tiny_llama(tmp_path / "target", vocab_size=12)
    prompt, filters, num_tokens, places = (5, 3, 11, 5, 3), Filters(0.8, top_k=8), 5, asyncio.Semaphore(16)
    async with running_stack(target=str(target), **PLACES[where]) as running, inference(running) as stub:

        async def draw(num_nodes: int | None) -> Generated:
            async with places:
                return await generate(
                    stub, prompt, gamma=3, num_nodes=num_nodes, n=16, max_tokens=num_tokens, ignore_eos=True,
                    **filters.fields(),
                )  # fmt: skip

        for num_nodes in (None, 8):
            answers = await asyncio.gather(*(draw(num_nodes) for _ in range(60)))
            drafted = sum(answer.usage.draft_tokens for answer in answers)
            accepted = sum(answer.usage.accepted_tokens for answer in answers)
            assert 0.03 * drafted < accepted < 0.97 * drafted
            samples = np.array([output.token_ids for answer in answers for output in answer.outputs])
            assert samples.shape == (60 * 16, num_tokens)
            assert least_p_value(samples, exact(target, prompt, num_tokens, filters)) > 1e-6
        await wait_until_idle(running)


async def test_a_draft_worker_with_nothing_to_draft_from_is_refused() -> None:
    lines = await refused_start("draft", "--model=none", "--copied-tokens=0")
    assert "outrider: model is none and copied_tokens is 0: there would be nothing to draft from" in lines
