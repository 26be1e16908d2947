"""Bad requests over the wire: refused by name, value and limit, with no worker touched."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import pytest_asyncio
from outrider.v1 import inference_pb2

from services.cli.stack import Stack
from shared.rpc.channel import connect
from tests.support.service import generate, inference, request, running_stack, status, wait_until_idle, worker_state

pytestmark = pytest.mark.asyncio(loop_scope="module")

VOCAB_SIZE = 4096
MAX_CONTEXT = 2048
GENERATE = "/outrider.v1.Inference/Generate"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack() -> AsyncIterator[Stack]:
    """One request runs, one waits."""
    router = {"OUTRIDER_ROUTER_MAX_RUNNING": "1", "OUTRIDER_ROUTER_MAX_WAITING": "1"}
    async with running_stack({"router": router}) as running:
        yield running


def varint_field(number: int, value: int) -> bytes:
    return bytes([number << 3 & 0x7F | 0x80, number >> 4, value]) if number > 15 else bytes([number << 3, value])


PROMPT = request("x").SerializeToString()

# Name, request (fields on a good prompt, or the bytes themselves), and what the details must name.
BAD: dict[str, tuple[dict[str, Any] | bytes, tuple[str, str, str]]] = {
    "unknown token id": (
        {"token_ids": {"ids": [1, VOCAB_SIZE]}},
        ("token_ids[1]", str(VOCAB_SIZE), str(VOCAB_SIZE)),
    ),
    "empty prompt": ({"text": ""}, ("text", "0 tokens", "at least 1 token")),
    "no token ids": ({"token_ids": {"ids": []}}, ("token_ids", "0 tokens", "at least 1 token")),
    "no prompt": (b"", ("prompt", "None", "text, token_ids, chat")),
    "prompt beyond the context": (
        {"token_ids": {"ids": [1] * MAX_CONTEXT}},
        ("token_ids", f"{MAX_CONTEXT} tokens", f"{MAX_CONTEXT - 1} tokens"),
    ),
    "output beyond the context": (
        {"token_ids": {"ids": [1] * 48}, "max_tokens": 2001},
        ("max_tokens", "2001", "[1, 2000]"),
    ),
    "no output": ({"max_tokens": 0}, ("max_tokens", "0", "[1, ")),
    "negative temperature": ({"temperature": -0.5}, ("temperature", "-0.5", "[0, 100]")),
    "temperature is no number": ({"temperature": math.nan}, ("temperature", "nan", "[0, 100]")),
    "top_p of 0": ({"top_p": 0.0}, ("top_p", "0", "(0, 1]")),
    "top_p above 1": ({"top_p": 1.5}, ("top_p", "1.5", "(0, 1]")),
    "min_p above 1": ({"min_p": 2.0}, ("min_p", "2", "[0, 1]")),
    "n of 0": ({"n": 0}, ("n", "0", "[1, 16]")),
    "n too large": ({"n": 17}, ("n", "17", "[1, 16]")),
    "logprobs too large": ({"logprobs": 21}, ("logprobs", "21", "[0, 20]")),
    "too many draft tokens": (
        {"speculation": {"num_draft_tokens": 17}},
        ("speculation.num_draft_tokens", "17", "[0, 16]"),
    ),
    "3 MB prompt": ({"text": "x" * 3_000_000}, ("text", "xxx", str(1 << 20))),
    "3 MB of empty fields": (b"\x72\x00" * 1_500_000, ("request", "16384 fields", "16384 fields")),
    "3 MB of unknown fields": (b"\x98\x06\x01" * 1_000_000, ("request", "16384 fields", "16384 fields")),
    "too many chat messages": ({"chat": {"messages": [{"role": "u"}] * 4097}}, ("chat.messages", "4097", "4096")),
    "text is not UTF-8": (b"\n\x03a\xff\xfe", ("text", "\\xff", "UTF-8")),
    "stop string is not UTF-8": (PROMPT + b"\x72\x01\xc3", ("stop[0]", "\\xc3", "UTF-8")),
    "not a message": (b"\xff\xff", ("request", "\\xff", "outrider.v1.GenerateRequest")),
    "too many stop strings": ({"stop": ["x"] * 17}, ("stop", "17 strings", "16")),
    "empty stop string": ({"stop": ["x", ""]}, ("stop[1]", "", "1 to 256")),
    "too many stop tokens": ({"stop_token_ids": [1] * 65}, ("stop_token_ids", "65 ids", "64")),
    "unknown stop token": ({"stop_token_ids": [VOCAB_SIZE]}, ("stop_token_ids[0]", str(VOCAB_SIZE), str(VOCAB_SIZE))),
    "logit bias too large": ({"logit_bias": {1: 101.0}}, ("logit_bias[1]", "101", "[-100, 100]")),
    "unknown field": (PROMPT + varint_field(99, 1), ("field number", "99", "outrider.v1.GenerateRequest")),
    # No field of a request is an enum so far; what stands for one is a value of another type.
    "field of another type": (PROMPT + varint_field(6, 1), ("field number", "6", "outrider.v1.GenerateRequest")),
    "chat without a template": (
        {"chat": {"messages": [{"role": "user", "content": "hi"}]}},
        ("chat", "1 messages", "no chat template"),
    ),
}


def payload(bad: dict[str, Any] | bytes) -> bytes:
    if isinstance(bad, bytes):
        return bad
    has_prompt = bad.keys() & {"text", "token_ids", "chat"}
    return inference_pb2.GenerateRequest(**({} if has_prompt else {"text": "x"}) | bad).SerializeToString()


@pytest.mark.parametrize("name", BAD)
async def test_bad_input_is_named(stack: Stack, name: str) -> None:
    bad, (field, value, limit) = BAD[name]
    async with connect(stack.router_address) as channel:
        send: Any = channel.unary_stream(GENERATE)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in send(payload(bad)):
                pass
    assert status(caught.value) is grpc.StatusCode.INVALID_ARGUMENT
    details = caught.value.details() or ""
    assert details.startswith(field)
    assert value in details
    assert limit in details
    assert len(details) < 1000


async def test_what_is_longer_than_any_prompt_is_not_even_read(stack: Stack) -> None:
    async with inference(stack) as stub:
        for prompt in ("x" * 4_000_000, [1] * 4_000_000):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await generate(stub, prompt)
            assert status(caught.value) is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "larger than max" in (caught.value.details() or "")
        # Of ids there may be as many as of bytes, of any vocabulary: they are counted and named.
        with pytest.raises(grpc.aio.AioRpcError, match=f"token_ids is '{1 << 20} tokens'"):
            await generate(stub, [(1 << 21) - 1] * (1 << 20))


async def test_bad_input_touched_no_worker(stack: Stack) -> None:
    # Behind all of the above: not one block has ever been used, and the only place to run is free.
    for name in ("target-0", "draft"):
        state = await worker_state(stack, name)
        assert state.num_sequences == 0
        assert state.free_blocks == state.total_blocks
    async with inference(stack) as stub:
        assert len((await generate(stub, "x", max_tokens=3, ignore_eos=True)).token_ids) == 3
    await wait_until_idle(stack)


async def test_a_full_queue_says_when_to_come_again(stack: Stack) -> None:
    async with inference(stack) as stub:
        started = asyncio.Event()
        running = asyncio.create_task(
            generate(stub, "x", on_chunk=lambda _: started.set(), max_tokens=400, temperature=0, ignore_eos=True)
        )
        await started.wait()
        # Two more at once: one waits, one is told.
        others = [generate(stub, "y", max_tokens=4, temperature=0, ignore_eos=True) for _ in range(2)]
        results = await asyncio.gather(*others, return_exceptions=True)
        refused = [result for result in results if isinstance(result, BaseException)]
        assert len(refused) == 1
        error = refused[0]
        assert isinstance(error, grpc.aio.AioRpcError)
        assert status(error) is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "1 of 1 sequences running and 1 of 1 requests waiting" in (error.details() or "")
        assert len((await running).token_ids) == 400
    await wait_until_idle(stack)
