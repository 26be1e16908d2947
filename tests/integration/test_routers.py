"""Two router processes on the same workers: each serves as if alone, and one that dies costs nobody but its clients."""

from __future__ import annotations

import asyncio
import os
import sys
from asyncio.subprocess import DEVNULL, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]
from outrider.v1 import inference_pb2_grpc

from services.cli.launcher import PARENT
from services.cli.ports import free_ports
from services.cli.stack import Stack
from shared.rpc.channel import connect
from tests.support.service import generate, inference, request, running_stack, wait_until_idle, worker_state

READY_SECONDS = 60.0
PROMPT = "class Router:\n    def __init__(self, workers):\n"
NUM_STREAMS = 6
NUM_TOKENS = 48


@asynccontextmanager
async def another_router(
    stack: Stack, only: str = "target"
) -> AsyncIterator[tuple[Process, inference_pb2_grpc.InferenceAsyncStub]]:
    """A process with the stack's workers, of the targets those whose names begin so, once it serves, and a client."""
    (port,) = free_ports("127.0.0.1", 1)
    targets = ",".join(process.address for name, process in stack.processes.items() if name.startswith(only))
    environment = {**os.environ, PARENT: str(os.getpid()), "OUTRIDER_ROUTER_REDIS_URL": stack.redis.url}
    command = [sys.executable, "-m", "services.cli.main", "router", f"--port={port}", f"--targets={targets}"]
    command += [f"--tokenizer={stack.settings.target}", f"--drafts={stack.processes['draft'].address}"]
    process = await asyncio.create_subprocess_exec(*command, env=environment, stdout=DEVNULL, stderr=DEVNULL)
    try:
        async with connect(f"127.0.0.1:{port}") as channel:
            await _until_serving(channel)
            yield process, inference_pb2_grpc.InferenceStub(channel)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _until_serving(channel: grpc.aio.Channel) -> None:
    stub: Any = health_pb2_grpc.HealthStub(channel)
    async with asyncio.timeout(READY_SECONDS):
        while True:
            try:
                async for answer in stub.Watch(health_pb2.HealthCheckRequest(), wait_for_ready=True):
                    if answer.status == health_pb2.HealthCheckResponse.SERVING:
                        return
            except grpc.aio.AioRpcError:
                await asyncio.sleep(0.1)


async def _read_all(call: Any) -> grpc.StatusCode:
    """Its status at the end."""
    with suppress(grpc.aio.AioRpcError):
        while await call.read() is not grpc.aio.EOF:
            pass
    status: grpc.StatusCode = await call.code()
    return status


async def test_two_routers_serve_as_one_does() -> None:
    async with running_stack(num_targets=2) as stack, inference(stack) as one, another_router(stack) as (_, other):
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


async def test_a_router_that_dies_takes_its_own_streams_alone() -> None:
    async with running_stack() as stack, inference(stack) as one, another_router(stack) as (process, other):
        expected = (await generate(one, PROMPT, seed=1, max_tokens=NUM_TOKENS)).token_ids
        endless: list[Any] = [
            other.Generate(request(PROMPT, seed=seed, max_tokens=900, ignore_eos=True)) for seed in range(NUM_STREAMS)
        ]
        # All of them run.
        for call in endless:
            await call.read()
        assert (await worker_state(stack, "target-0")).num_sequences == NUM_STREAMS
        own = [asyncio.create_task(generate(one, PROMPT, seed=1, max_tokens=NUM_TOKENS)) for _ in range(NUM_STREAMS)]
        process.kill()
        for call in endless:
            assert await _read_all(call) == grpc.StatusCode.UNAVAILABLE
        assert [(await each).token_ids for each in own] == [expected] * NUM_STREAMS
        # What the dead one held is free without anybody's doing, and no worker had to start again.
        await wait_until_idle(stack)
        assert {each.restarts for each in stack.processes.values()} == {0}


async def test_a_router_places_where_the_other_has_less() -> None:
    async with (
        running_stack(num_targets=2) as stack,
        inference(stack) as one,
        another_router(stack, "target-0") as (_, other),
    ):
        # So many that a step beside them takes several times as long, however noisy the machine.
        calls: list[Any] = [
            other.Generate(request(PROMPT, gamma=0, seed=seed, max_tokens=1500, ignore_eos=True)) for seed in range(24)
        ]
        # For so many steps that everybody has been told.
        for _ in range(40):
            for call in calls:
                await call.read()
        for seed in range(8):
            prompt = f"# {seed}\n{PROMPT}"
            calls.append(one.Generate(request(prompt, gamma=0, seed=seed, max_tokens=1500, ignore_eos=True)))
            await calls[-1].read()
        found = {name: (await worker_state(stack, name)).num_sequences for name in ("target-0", "target-1")}
        assert sum(found.values()) == 32
        # Who does not know of the other's streams gives each target half. What steps cost is measured, so one of them
        # may go where others would not.
        assert found["target-1"] >= 6, found
        for call in calls:
            call.cancel()
        await wait_until_idle(stack)
