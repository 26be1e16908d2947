"""Targets that draft for themselves, through the service: with their first layers, and with heads of every kind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import pytest_asyncio
import torch
from outrider.v1 import inference_pb2

from services.cli.stack import Stack
from shared.models import DEMO_DRAFT, DEMO_HEADS, DEMO_TARGET
from tests.support.distribution import Filters, exact, least_p_value
from tests.support.greedy import Reference, python_prompts, references
from tests.support.heads import (
    config_of,
    eagle3_weights,
    eagle_weights,
    layer_config,
    medusa_weights,
    write_head,
    write_medusa,
)
from tests.support.models import perturbed, tiny_llama
from tests.support.service import COPYING_NOTHING, Generated, generate, inference, running_stack, wait_until_idle

pytestmark = pytest.mark.asyncio(loop_scope="module")

NUM_TOKENS = 48
RESTART_SECONDS = 60
HALFWAY_CHUNKS = 8
KINDS = ["early exit", "medusa", "eagle", "eagle3", "model"]
# Number of draft tokens, and of a tree's.
SHAPES: list[tuple[int | None, int | None]] = [(1, None), (3, None), (None, None), (3, 10)]


def write_drafter(kind: str, folder: Path, target: Path = DEMO_TARGET) -> dict[str, str]:
    """What a target worker is told so as to draft with it; heads are random ones."""
    torch.manual_seed(1)
    config = config_of(target)
    match kind:
        case "medusa":
            head = write_medusa(folder, medusa_weights(config, 3))
        case "eagle":
            head = write_head(folder, eagle_weights(config), layer_config(config))
        case "eagle3":
            said = layer_config(config) | {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
            head = write_head(folder, eagle3_weights(config, config.vocab_size // 2), said)
        case "model":
            return {"OUTRIDER_TARGET_DRAFT": str(perturbed(target, folder, noise=0.1))}
        case _:
            return {"OUTRIDER_TARGET_EARLY_EXIT": str(config.num_hidden_layers - 1)}
    return {"OUTRIDER_TARGET_HEAD": str(head)}


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=KINDS)
async def stack(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    told = write_drafter(request.param, tmp_path_factory.mktemp("head"))
    async with running_stack({"target-0": told | COPYING_NOTHING}, draft=None) as running:
        yield running


@pytest.fixture(scope="module")
def demo_references() -> list[Reference]:
    return references(DEMO_TARGET, python_prompts(60), 3, NUM_TOKENS)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
async def test_greedy_text_is_the_targets_own(
    stack: Stack, demo_references: list[Reference], shape: tuple[int | None, int | None]
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
        drafts_with = (await stub.GetModelInfo(inference_pb2.GetModelInfoRequest())).target_drafts_with
    if gamma is not None:
        for answer in answers:
            [its] = answer.usage.by_source
            assert its.source == inference_pb2.DRAFT_SOURCE_TARGET
            assert (its.rounds, its.draft_tokens) == (answer.usage.rounds, answer.usage.draft_tokens)
            assert answer.usage.rounds > 0
    if drafts_with == "early exit" and gamma is not None:
        assert sum(answer.usage.accepted_tokens for answer in answers) > NUM_TOKENS // 2
    await wait_until_idle(stack)


async def test_seeded_text_is_the_same_however_it_is_drafted(stack: Stack, demo_references: list[Reference]) -> None:
    fields: dict[str, Any] = {
        "prompt": demo_references[0].prompt, "max_tokens": NUM_TOKENS, "temperature": 0.6, "seed": 9, "n": 3,
        "frequency_penalty": 0.2, "repetition_penalty": 1.1, "ignore_eos": True,
    }  # fmt: skip
    async with inference(stack) as stub:
        texts = [
            [output.token_ids for output in (await generate(stub, gamma=gamma, num_nodes=nodes, **fields)).outputs]
            for gamma, nodes in ((0, None), *SHAPES[1:])
        ]
    assert all(each == texts[0] for each in texts[1:])
    await wait_until_idle(stack)


async def test_a_target_that_dies_halfway_changes_no_token(stack: Stack, demo_references: list[Reference]) -> None:
    reference, num_chunks = demo_references[1], 0

    def on_chunk(_: object) -> None:
        nonlocal num_chunks
        num_chunks += 1
        if num_chunks == HALFWAY_CHUNKS:
            stack.kill("target-0")

    async with inference(stack) as stub:
        answer = await generate(
            stub, reference.prompt, gamma=1, max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True, on_chunk=on_chunk
        )
    assert answer.token_ids == reference.token_ids
    async with asyncio.timeout(RESTART_SECONDS):
        await stack.processes["target-0"].ready.wait()
    await wait_until_idle(stack)


async def test_who_may_draft_is_the_requests_to_say(demo_references: list[Reference]) -> None:
    told = {"target-0": {"OUTRIDER_TARGET_EARLY_EXIT": "5"}}
    reference = demo_references[0]
    async with running_stack(told, draft=str(DEMO_DRAFT)) as stack, inference(stack) as stub:

        async def sources_of(*sources: inference_pb2.DraftSource) -> set[inference_pb2.DraftSource]:
            answer = await generate(
                stub, reference.prompt, gamma=3, max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True, sources=sources
            )
            assert answer.token_ids == reference.token_ids
            return {its.source for its in answer.usage.by_source}

        target, model = inference_pb2.DRAFT_SOURCE_TARGET, inference_pb2.DRAFT_SOURCE_MODEL
        suffix = inference_pb2.DRAFT_SOURCE_SUFFIX
        assert await sources_of(target) == {target}
        assert await sources_of(model) == {model}
        # Its output was copied from the requests before.
        assert await sources_of(suffix) == {suffix}
        assert await sources_of(model, suffix) <= {model, suffix}
        # Rounds of a fixed length are the draft worker's, where there is one.
        assert target not in await sources_of()
        await wait_until_idle(stack)


@pytest.mark.parametrize(
    ("head", "drafters"),
    [
        (None, {inference_pb2.DRAFT_SOURCE_MODEL, inference_pb2.DRAFT_SOURCE_SUFFIX}),
        (str(DEMO_HEADS / "eagle3"), {inference_pb2.DRAFT_SOURCE_TARGET, inference_pb2.DRAFT_SOURCE_SUFFIX}),
    ],
    ids=["by a draft worker", "by the target"],
)
async def test_what_several_draft_is_one_tree(head: str | None, drafters: set[inference_pb2.DraftSource]) -> None:
    """Prompts that begin again with what they began with, and go on otherwise."""
    prompts = [prompt[:120] + prompt[:20] for prompt in python_prompts(120)]
    expected = references(DEMO_TARGET, prompts, 4, NUM_TOKENS)
    draft = None if head else str(DEMO_DRAFT)
    async with running_stack(head=head, draft=draft) as stack, inference(stack) as stub:
        answers = []
        for reference in expected:
            answer = await generate(
                stub, reference.prompt, gamma=3, num_nodes=16, max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True,
                include_draft_tokens=True,
            )  # fmt: skip
            assert answer.token_ids == reference.token_ids
            answers.append(answer)
        await wait_until_idle(stack)
    assert {its.source for answer in answers for its in answer.usage.by_source} == drafters
    # In some rounds both have tokens.
    assert any(sum(its.rounds for its in answer.usage.by_source) > answer.usage.rounds for answer in answers)
    accepted = [
        token.source
        for answer in answers
        for token in answer.outputs[0].draft_tokens
        if token.origin == inference_pb2.TOKEN_ORIGIN_ACCEPTED
    ]
    assert set(accepted) == drafters


# An EAGLE-1 is drawn from as an EAGLE-3 is.
@pytest.mark.parametrize(
    "kind", [pytest.param(each, marks=pytest.mark.long if each == "eagle" else ()) for each in KINDS]
)
async def test_unseeded_samples_follow_the_target(kind: str, tmp_path: Path) -> None:
    target = tiny_llama(tmp_path / "target", vocab_size=12)
    told = write_drafter(kind, tmp_path / "head", target)
    prompt, filters, num_tokens, places = (5, 3, 11, 7), Filters(1.0, top_k=8), 5, asyncio.Semaphore(16)
    async with running_stack({"target-0": told}, target=str(target), draft=None) as running, inference(running) as stub:

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
    assert sum(answer.usage.accepted_tokens for answer in answers) > 0.2 * sum(
        answer.usage.rounds for answer in answers
    )
    assert len(np.unique(samples, axis=0)) > 200
    assert least_p_value(samples, exact(target, prompt, num_tokens, filters)) > 1e-6


async def test_sources_that_are_none_are_named(stack: Stack) -> None:
    model = inference_pb2.DRAFT_SOURCE_MODEL
    async with inference(stack) as stub:
        for sources in ([inference_pb2.DRAFT_SOURCE_UNSPECIFIED], [model, model]):
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await generate(stub, "def", sources=sources, max_tokens=2)
            assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT
            assert f"speculation.sources[{len(sources) - 1}]" in str(error.value.details())
        # Nobody is left to draft.
        alone = await generate(stub, "def", sources=[model], max_tokens=8)
    assert alone.usage.rounds == 0


@pytest.mark.parametrize(("kind", "least"), [("eagle3", 0.9), ("medusa", 0.4)])
async def test_the_demo_heads_draft_well(kind: str, least: float, demo_references: list[Reference]) -> None:
    """So many accepted tokens a round at least, in chains of three, and none other than the target's own."""
    told = {"target-0": {"OUTRIDER_TARGET_HEAD": str(DEMO_HEADS / kind)}}
    async with running_stack(told, draft=None, dtype="bfloat16") as stack, inference(stack) as stub:
        answers = []
        for gamma in (0, 3):
            answers.append(
                await asyncio.gather(
                    *(
                        generate(stub, each.prompt, gamma=gamma, max_tokens=96, temperature=0, ignore_eos=True)
                        for each in demo_references
                    )
                )
            )
        await wait_until_idle(stack)
    plain, drafted = answers
    assert [each.token_ids for each in drafted] == [each.token_ids for each in plain]
    accepted = sum(each.usage.accepted_tokens for each in drafted)
    assert accepted > least * sum(each.usage.rounds for each in drafted)
