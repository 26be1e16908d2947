"""Redis killed and started again under load: requests go on, and the prefix index heals."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from collections.abc import AsyncIterator, Sequence

import pytest
import pytest_asyncio
from outrider.v1 import inference_pb2_grpc, target_pb2_grpc, worker_pb2

from services.cli.stack import Stack
from shared.models import DEMO_TARGET
from shared.prefix.block_hash import hash_blocks, root_hash
from shared.prefix.index import PrefixIndex
from shared.rpc.channel import connect
from tests.support.greedy import Reference, python_prompts, references
from tests.support.service import generate, inference, running_stack, wait_until_idle

pytestmark = pytest.mark.asyncio(loop_scope="module")

TARGETS = ("target-0", "target-1")
NUM_CLIENTS = 8
NUM_TOKENS = 48
LONG_PROMPT = 500
HEAL_SECONDS = 60.0
LOAD_SECONDS = 120.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack() -> AsyncIterator[Stack]:
    with pytest.MonkeyPatch.context() as patch:
        # How long Redis is away is for the test to say.
        patch.setattr("services.cli.stack._REDIS_WATCH_SECONDS", 3600.0)
        async with running_stack(num_targets=2) as running:
            yield running


class Load:
    """Clients that repeat requests, all of whose answers must be right, until told to stop."""

    def __init__(self, stub: inference_pb2_grpc.InferenceAsyncStub, expected: Sequence[Reference]) -> None:
        self._stub = stub
        self._requests = itertools.cycle(expected)
        self._num_answers = 0
        self._answered = asyncio.Condition()
        self._stopping = False
        self._clients: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Load:
        self._clients = [asyncio.create_task(self._client()) for _ in range(NUM_CLIENTS)]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stopping = True
        await asyncio.gather(*self._clients)

    async def go_on(self) -> None:
        """Returns when two more rounds of requests, at least one of them begun from here, have been answered."""
        goal = self._num_answers + 2 * NUM_CLIENTS
        async with asyncio.timeout(LOAD_SECONDS), self._answered:
            await self._answered.wait_for(
                lambda: self._num_answers >= goal or any(client.done() for client in self._clients)
            )
        assert self._num_answers >= goal, "a request failed"

    async def _client(self) -> None:
        try:
            while not self._stopping:
                await answered_rightly(self._stub, next(self._requests))
                self._num_answers += 1
                async with self._answered:
                    self._answered.notify_all()
        finally:
            async with self._answered:
                self._answered.notify_all()


async def answered_rightly(stub: inference_pb2_grpc.InferenceAsyncStub, reference: Reference) -> int:
    """Sends the request; the prompt tokens that were found cached."""
    answer = await generate(stub, reference.prompt, max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
    assert answer.token_ids == reference.token_ids
    return answer.usage.cached_tokens


async def worker_info(stack: Stack, name: str) -> worker_pb2.WorkerInfo:
    async with connect(stack.processes[name].address) as channel:
        return await target_pb2_grpc.TargetStub(channel).GetWorkerInfo(worker_pb2.GetWorkerInfoRequest())


async def test_requests_go_on_and_the_index_heals(stack: Stack) -> None:
    prompts = python_prompts(LONG_PROMPT)
    long = references(DEMO_TARGET, prompts, 6, NUM_TOKENS)
    load = [
        reference for length in (30, 90) for reference in references(DEMO_TARGET, python_prompts(length), 4, NUM_TOKENS)
    ]
    first, second = [await worker_info(stack, name) for name in TARGETS]
    instances = [first.instance_id, second.instance_id]
    num_full = (LONG_PROMPT - 1) // first.block_size
    root = root_hash(first.fingerprint, b"")
    chains = [hash_blocks(each.prompt[: num_full * first.block_size], first.block_size, root) for each in long]
    index = PrefixIndex(stack.redis.url, first.fingerprint, timeout_seconds=2.0)

    async def holders() -> list[dict[str, int]]:
        return [await index.lookup(chain, instances) for chain in chains]

    async def wait_until_held() -> list[dict[str, int]]:
        """Returns when the index knows a worker that holds each prompt's full blocks."""
        async with asyncio.timeout(HEAL_SECONDS):
            while True:
                known = await holders()
                if all(num_full in depths.values() for depths in known):
                    return known
                await asyncio.sleep(0.1)

    async with inference(stack) as stub:
        # All at once: load spreads them over both workers.
        await asyncio.gather(*(answered_rightly(stub, reference) for reference in long))
        known = await wait_until_held()
        on_second = [i for i, depths in enumerate(known) if depths == {instances[0]: 0, instances[1]: num_full}]
        assert on_second, known

        async with Load(stub, load) as clients:
            await clients.go_on()
            assert stack.redis.pid is not None
            os.kill(stack.redis.pid, signal.SIGKILL)
            stack.redis.stop()
            await clients.go_on()
            assert await holders() == [{}] * len(long)
            await asyncio.to_thread(stack.redis.start)
            await clients.go_on()
            assert await wait_until_held() == known
        await wait_until_idle(stack)

        # Idle workers cost alike, and the first would be chosen, but for what the index says of the second.
        for i in on_second:
            assert await answered_rightly(stub, long[i]) == num_full * first.block_size
    await index.close()
    assert all(process.restarts == 0 for process in stack.processes.values())
