"""Workers that are restarted one after another under load: their sequences go elsewhere, with their KV."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from services.cli.stack import Stack
from tests.support.service import Generated, generate, inference, running_stack, wait_until_idle

pytestmark = pytest.mark.asyncio(loop_scope="module")

NUM_STREAMS = 4
NUM_TOKENS = 200
RESTART_SECONDS = 90.0
# The most that a stream may stand still: one that had to compute everything again would show in the worker's log.
STANDSTILL_SECONDS = 20.0


@pytest_asyncio.fixture(
    scope="module", loop_scope="module", params=[pytest.param("both", marks=pytest.mark.long), "pools"]
)
async def stack(request: pytest.FixtureRequest) -> AsyncIterator[Stack]:
    pools: dict[str, Any] = {"num_targets": 2} if request.param == "both" else {"num_prefill": 1, "num_decode": 2}
    async with running_stack(drain_seconds=30.0, **pools) as running:
        yield running


async def sample(stack: Stack, seed: int, gaps: list[float] | None = None) -> Generated:
    last = time.monotonic()

    def on_chunk(_: object) -> None:
        nonlocal last
        if gaps is not None:
            gaps.append(time.monotonic() - last)
        last = time.monotonic()

    async with inference(stack) as stub:
        return await generate(
            stub,
            f"class Number{seed}:\n    def __init__(self",
            gamma=(0, 3, None)[seed % 3],
            max_tokens=NUM_TOKENS,
            temperature=0.8,
            seed=seed,
            n=1 + seed % 2,
            ignore_eos=True,
            on_chunk=on_chunk,
        )


async def test_a_rolling_restart_loses_and_repeats_no_token(stack: Stack) -> None:
    expected = await asyncio.gather(*(sample(stack, seed) for seed in range(NUM_STREAMS)))
    await wait_until_idle(stack)
    gaps: list[float] = []
    answers: list[asyncio.Task[list[Generated]]] = []
    stopping = asyncio.Event()

    async def load(seed: int) -> list[Generated]:
        found: list[Generated] = []
        while not stopping.is_set() or not found:
            found.append(await sample(stack, seed, gaps))
        return found

    answers = [asyncio.create_task(load(seed)) for seed in range(NUM_STREAMS)]
    workers = [name for name in stack.processes if name.startswith(("target", "prefill", "decode", "draft"))]
    for name in workers:
        process = stack.processes[name]
        restarts = process.restarts
        stack.restart(name)
        async with asyncio.timeout(RESTART_SECONDS):
            await process.ready.wait()
        assert process.restarts == restarts + 1
    stopping.set()
    for task, one in zip(answers, expected, strict=True):
        for answer in await task:
            assert [each.token_ids for each in answer.outputs] == [each.token_ids for each in one.outputs]
    assert max(gaps) < STANDSTILL_SECONDS
    await wait_until_idle(stack)
    lost = [line for name, line in stack.lines if name == "router" and "sequence lost" in line]
    # With what the workers said before: why.
    assert len(lost) <= 2, "\n".join(f"{name} {line}" for name, line in stack.lines)
