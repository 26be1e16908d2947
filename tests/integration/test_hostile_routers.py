"""A router that says what none should, well-formed: it costs nobody else a token, and the worker nothing."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import grpc
import pytest
import pytest_asyncio
from outrider.v1 import target_pb2, target_pb2_grpc, worker_pb2

from services.cli.stack import Stack
from shared.rpc.channel import connect
from tests.support.service import generate, inference, running_stack, wait_until_idle

pytestmark = pytest.mark.asyncio(loop_scope="module")

SECONDS = 60.0
SHORT, LONG = list(range(100, 115)), list(range(200, 233))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack() -> AsyncIterator[Stack]:
    """Little KV: what does not fit is soon met."""
    async with running_stack({"target-0": {"OUTRIDER_TARGET_NUM_BLOCKS": "200"}}, draft=None) as running:
        yield running


def params(**fields: Any) -> worker_pb2.SequenceParams:
    return worker_pb2.SequenceParams(
        **({"temperature": 0.0, "top_p": 1.0, "repetition_penalty": 1.0, "max_tokens": 8} | fields)
    )


def request(**operations: Any) -> target_pb2.TargetRequest:
    return target_pb2.TargetRequest(
        operations=[target_pb2.TargetOperation(**{name: value}) for name, value in operations.items()]
    )


def prefill(sequence_id: int, token_ids: list[int], **fields: Any) -> target_pb2.Prefill:
    defaults: dict[str, Any] = {"num_prompt_tokens": len(token_ids), "num_steps": 8, "params": params()}
    return target_pb2.Prefill(sequence_id=sequence_id, token_ids=token_ids, **(defaults | fields))


async def refusal(stack: Stack, *messages: Any) -> tuple[grpc.StatusCode, str]:
    """How a stream ends that says this."""
    async with connect(stack.processes["target-0"].address) as channel:
        rpc: Any = channel.stream_stream("/outrider.v1.Target/Serve")
        call = rpc(timeout=SECONDS)
        # It may be over before all is said.
        with suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):
            for message in messages:
                await call.write(message)
        with suppress(grpc.aio.AioRpcError):
            async for _ in call:
                pass
        return await call.code(), await call.details()


async def check_served(stack: Stack, expected: list[int]) -> None:
    async with inference(stack) as stub:
        assert (await generate(stub, "def main():\n", seed=1, max_tokens=16)).token_ids == expected
    await wait_until_idle(stack)
    assert stack.processes["target-0"].restarts == 0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def expected(stack: Stack) -> list[int]:
    async with inference(stack) as stub:
        return (await generate(stub, "def main():\n", seed=1, max_tokens=16)).token_ids


async def test_more_output_than_it_may_have_gets_nothing_past_the_context(stack: Stack, expected: list[int]) -> None:
    endless = prefill(1, [7] * 5000, num_prompt_tokens=1, params=params(max_tokens=1))
    code, details = await refusal(stack, request(prefill=endless).SerializeToString())
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert details.startswith("operations[0].prefill.params.max_tokens is 1:")
    await check_served(stack, expected)


async def test_a_message_of_nothing_but_operations_is_not_parsed(stack: Stack, expected: list[int]) -> None:
    code, details = await refusal(stack, b"\x0a\x00" * 10_000_000)
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert "more than 262144 fields" in details
    await check_served(stack, expected)


async def _first_answer(stack: Stack, sequence_id: int, token_ids: list[int], **fields: Any) -> list[int]:
    """Its eight tokens, over a stream of its own."""
    found: list[int] = []
    async with connect(stack.processes["target-0"].address) as channel:
        rpc: Any = target_pb2_grpc.TargetStub(channel)
        call = rpc.Serve(timeout=SECONDS)
        await call.write(request(prefill=prefill(sequence_id, token_ids, **fields)))
        async for response in call:
            found += [token for result in response.results for token in result.token_ids]
            if len(found) == 8:
                break
        call.cancel()
    return found


async def test_no_sequence_begins_with_the_kv_of_other_tokens(stack: Stack, expected: list[int]) -> None:
    truth = await _first_answer(stack, 1, LONG, cache_salt=b"another's")
    address, ticket = stack.processes["target-0"].address, os.urandom(16)
    async with connect(address) as channel:
        rpc: Any = target_pb2_grpc.TargetStub(channel)
        call = rpc.Serve(timeout=SECONDS)
        await call.write(
            request(prefill=prefill(1, SHORT, num_steps=1), export=target_pb2.Export(sequence_id=1, ticket=ticket))
        )
        await call.write(
            request(
                pull=target_pb2.Pull(pull_id=9, address=address, ticket=ticket, token_ids=SHORT),
                prefill=prefill(2, LONG, pull_id=9),
            )
        )
        found: list[int] = []
        async for response in call:
            found += [token for result in response.results if result.sequence_id == 2 for token in result.token_ids]
            if len(found) == 8:
                break
        call.cancel()
    assert found == truth
    # And nobody finds anything else in the cache.
    assert await _first_answer(stack, 1, LONG) == truth
    await check_served(stack, expected)


async def test_a_flood_is_held_up_where_it_comes_from(stack: Stack, expected: list[int]) -> None:
    verify = [
        target_pb2.TargetOperation(verify=target_pb2.Verify(sequence_id=(1 << 60) + number, position=1, num_steps=1))
        for number in range(20_000)
    ]
    message = target_pb2.TargetRequest(operations=verify).SerializeToString()
    num_written = 0
    async with connect(stack.processes["target-0"].address) as channel:
        rpc: Any = channel.stream_stream("/outrider.v1.Target/Serve")
        call = rpc()

        async def write() -> None:
            nonlocal num_written
            with suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):
                while True:
                    await call.write(message)
                    num_written += 1

        writing = asyncio.create_task(write())
        # Nothing of what it is answered is read.
        async with inference(stack) as stub:
            generated = await generate(stub, "def main():\n", seed=1, max_tokens=16)
            assert generated.token_ids == expected
        writing.cancel()
        with suppress(asyncio.CancelledError):
            await writing
        call.cancel()
    assert num_written < 2000
    await check_served(stack, expected)


async def test_streams_without_end_are_refused(stack: Stack, expected: list[int]) -> None:
    async with connect(stack.processes["target-0"].address) as channel:
        rpc: Any = target_pb2_grpc.TargetStub(channel)
        calls = [rpc.Serve() for _ in range(300)]
        # What is taken says nothing, so the others end first.
        ended = {asyncio.create_task(call.code()) for call in calls}
        refused: list[grpc.StatusCode] = []
        async with asyncio.timeout(SECONDS):
            # Of 300 one is taken up to the limit, which the stack's own router counts for as well.
            while len(refused) < 300 - 255:
                done, ended = await asyncio.wait(ended, return_when=asyncio.FIRST_COMPLETED)
                refused += [each.result() for each in done]
        assert set(refused) == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        for each in ended:
            each.cancel()
        for call in calls:
            call.cancel()
    await check_served(stack, expected)
