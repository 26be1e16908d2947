"""Two router processes on the same workers: each serves as if alone, and one that dies costs nobody but its clients."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import grpc

from services.router.workers.fleet import Fleet
from services.router.workers.target_link import TargetLink
from shared.engine.tokenizer_fingerprint import tokenizer_fingerprint
from shared.policy.step_costs import StepCosts
from tests.support.another_router import another_router
from tests.support.router_stack import until
from tests.support.service import generate, inference, request, running_stack, wait_until_idle, worker_state

TARGETS, DRAFTS = ["target-0", "target-1"], ["draft"]
PROMPT = "class Router:\n    def __init__(self, workers):\n"
NUM_STREAMS = 6
NUM_TOKENS = 48


async def _read_all(call: Any) -> grpc.StatusCode:
    """Its status at the end."""
    with suppress(grpc.aio.AioRpcError):
        while await call.read() is not grpc.aio.EOF:
            pass
    status: grpc.StatusCode = await call.code()
    return status


async def test_two_routers_serve_as_one_does() -> None:
    async with (
        running_stack(num_targets=2) as stack,
        inference(stack) as one,
        another_router(stack, TARGETS, DRAFTS) as (_, other),
    ):
        expected = [
            (await generate(one, PROMPT, seed=seed, max_tokens=NUM_TOKENS)).token_ids for seed in range(NUM_STREAMS)
        ]
        for gamma in (None, 3):
            streams = [
                generate(stub, PROMPT, seed=seed, max_tokens=NUM_TOKENS, gamma=gamma)
                for seed in range(NUM_STREAMS)
                for stub in (one, other)
            ]
            found = [generated.token_ids for generated in await asyncio.gather(*streams)]
            assert found == [tokens for tokens in expected for _ in range(2)]
        await wait_until_idle(stack)
        # Nobody's objects are looked through again while there is work.
        kept = {name for name, line in stack.lines if "ready to serve" in line}
        assert kept == {"router", "draft", *TARGETS}


async def test_a_router_that_dies_takes_its_own_streams_alone() -> None:
    async with (
        running_stack() as stack,
        inference(stack) as one,
        another_router(stack, TARGETS[:1], DRAFTS) as (process, other),
    ):
        expected = (await generate(one, PROMPT, seed=1, max_tokens=NUM_TOKENS)).token_ids
        endless: list[Any] = [
            other.Generate(request(PROMPT, seed=seed, max_tokens=900, ignore_eos=True)) for seed in range(NUM_STREAMS)
        ]
        # All of them run.
        for call in endless:
            await call.read()
        assert (await worker_state(stack, "target-0")).num_sequences == NUM_STREAMS
        own = [asyncio.create_task(generate(one, PROMPT, seed=1, max_tokens=NUM_TOKENS)) for _ in range(NUM_STREAMS)]
        process.abandon()
        for call in endless:
            assert await _read_all(call) == grpc.StatusCode.UNAVAILABLE
        assert [(await each).token_ids for each in own] == [expected] * NUM_STREAMS
        # What the dead one held is free without anybody's doing, and no worker had to start again.
        await wait_until_idle(stack)
        assert {each.restarts for each in stack.processes.values()} == {0}


async def test_a_router_places_where_the_other_has_less() -> None:
    async with running_stack(num_targets=2) as stack, another_router(stack, TARGETS[:1]) as (_, other):
        addresses = [stack.processes[name].address for name in TARGETS]
        fleet = Fleet(addresses, [], tokenizer_fingerprint(str(stack.settings.target)), 8, 16, None)
        fleet.start()
        try:
            busy, idle = fleet.targets
            await until(lambda: busy.connected and idle.connected, "both are connected")
            # Measured, on cores that both share, they would differ by chance, and where a request goes with them.
            for link in fleet.targets:
                link.costs = StepCosts([(1, 0.01), (64, 0.04)])
            calls: list[Any] = [
                other.Generate(request(PROMPT, gamma=0, seed=seed, max_tokens=1500, ignore_eos=True))
                for seed in range(NUM_STREAMS)
            ]
            await until(lambda: busy.num_decoding == NUM_STREAMS, "it is told of the other's streams")
            assert (idle.num_decoding, idle.num_waiting, busy.num_waiting) == (0, 0, 0)
            assert await _placed(fleet) == {idle}
            for call in calls:
                call.cancel()
            await until(lambda: busy.num_decoding == 0, "it is told that they are gone")
            assert await _placed(fleet) == {busy, idle}
        finally:
            await fleet.close()
        await wait_until_idle(stack)


async def _placed(fleet: Fleet) -> set[TargetLink]:
    """Where many requests would go that come now, one by one."""
    return {(await fleet.placer.place(list(range(1, 50)), b"", 200, ())).decode for _ in range(30)}
