"""Workers that stand still under load and go on later, or have less room than is asked for: nothing is left on them,
and nobody waits for ever."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import pytest
import pytest_asyncio
from outrider.v1 import draft_pb2, draft_pb2_grpc, inference_pb2_grpc

from services.cli.stack import Stack
from shared.models import DEMO_TARGET
from shared.rpc.channel import connect
from shared.sampling.params import SamplingParams
from shared.worker.messages import params_to_proto
from tests.support.greedy import Reference, python_prompts, references
from tests.support.service import collect, generate, inference, request, running_stack, status, wait_until_idle

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(120)]

NUM_TOKENS = 48
# To a worker that stands still a connection takes some 4 MiB before a write waits; these are 7, at 14 KiB each.
NUM_REQUESTS = 500
LONG_PROMPT = [500] * 1900
MANY_BIASES = dict.fromkeys(range(1000, 2024), 0.5)
DEADLINE_SECONDS = 3.0
NUM_DRAFT_SEATS = 3


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack() -> AsyncIterator[Stack]:
    router = {"OUTRIDER_ROUTER_MAX_RUNNING": str(NUM_REQUESTS)}
    target = {"OUTRIDER_TARGET_NUM_BLOCKS": "1000"}
    draft = {"OUTRIDER_DRAFT_MAX_SEQUENCES": str(NUM_DRAFT_SEATS)}
    async with running_stack({"router": router, "target-0": target, "draft": draft}) as running:
        yield running


@pytest.fixture(scope="module")
def expected() -> Reference:
    return references(DEMO_TARGET, python_prompts(200), 1, NUM_TOKENS)[0]


@contextmanager
def stopped(stack: Stack, name: str) -> Iterator[None]:
    """The process stands still meanwhile; its connections stay open."""
    process = stack.processes[name]
    process._signal(signal.SIGSTOP)
    try:
        yield
    finally:
        process._signal(signal.SIGCONT)


async def test_requests_that_end_while_the_target_stands_still_leave_nothing_on_it(
    stack: Stack, expected: Reference
) -> None:
    """The router gathers what it cannot send, beginnings and ends of sequences together."""

    async def out_of_time(stub: inference_pb2_grpc.InferenceAsyncStub, number: int) -> None:
        made = request([number, *LONG_PROMPT], gamma=0, max_tokens=NUM_TOKENS, logit_bias=MANY_BIASES)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(stub.Generate(made, timeout=DEADLINE_SECONDS))
        assert status(caught.value) in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE)

    async with inference(stack) as stub:
        with stopped(stack, "target-0"):
            await asyncio.gather(*(out_of_time(stub, number) for number in range(NUM_REQUESTS)))
        await wait_until_idle(stack)
        answer = await generate(stub, expected.prompt, max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
    assert answer.token_ids == expected.token_ids
    assert all(process.restarts == 0 for process in stack.processes.values())


async def test_sequences_that_nobody_asks_for_do_not_keep_the_drafter_from_others(stack: Stack) -> None:
    def ask(sequence_id: int) -> draft_pb2.DraftRequest:
        params = params_to_proto(SamplingParams(temperature=0.0))
        prompt = [sequence_id] * 40
        propose = draft_pb2.Propose(
            sequence_id=sequence_id, token_ids=prompt, num_prompt_tokens=40, num_draft_tokens=2, params=params
        )
        return draft_pb2.DraftRequest(operations=[draft_pb2.DraftOperation(propose=propose)])

    async with connect(stack.processes["draft"].address) as channel:
        call: Any = draft_pb2_grpc.DrafterStub(channel).Serve()
        # None is released: each keeps its place when it has been answered, until another needs it.
        for sequence_id in range(1, 2 * NUM_DRAFT_SEATS + 1):
            await call.write(ask(sequence_id))
            async with asyncio.timeout(30):
                while not (answer := await call.read()).results:
                    pass
            assert [result.sequence_id for result in answer.results] == [sequence_id]
            assert len(answer.results[0].proposal.token_ids) == 2
        call.cancel()
    await wait_until_idle(stack)


async def test_streams_go_on_while_the_drafter_stands_still_and_leave_nothing_on_it(
    stack: Stack, expected: Reference
) -> None:
    async def check(stub: inference_pb2_grpc.InferenceAsyncStub) -> int:
        answer = await generate(stub, expected.prompt, gamma=4, max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
        assert answer.token_ids == expected.token_ids
        return answer.usage.rounds

    async with inference(stack) as stub:
        with stopped(stack, "draft"):
            assert await asyncio.gather(*(check(stub) for _ in range(40))) == [0] * 40
        await wait_until_idle(stack)
        # The link may just be connected anew.
        async with asyncio.timeout(30):
            while await check(stub) == 0:
                pass
    assert all(process.restarts == 0 for process in stack.processes.values())
