"""Clients that leave or do not read: nothing is left of them, and nobody waits for them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from outrider.v1 import inference_pb2, inference_pb2_grpc

from services.router.clients import chunk_queue
from services.router.clients.chunk_queue import ChunkQueue
from services.router.clients.request import ModelLimits, parse_generate
from services.router.clients.usage import UsageMeter
from services.router.generation.session import Session
from services.router.text.tokenizer import TextTokenizer
from shared.rpc import edge
from shared.rpc.channel import connect
from shared.rpc.options import CHANNEL_OPTIONS
from shared.telemetry.metrics import RouterMetrics
from shared.telemetry.tracing import configure
from tests.support.fake_drafter import Answer
from tests.support.fake_workers import plain_output
from tests.support.router_stack import GREEDY, PROMPT, TOKENIZER, Stack, greedy, read, read_all, stack, until

pytestmark = pytest.mark.timeout(60)


# Clients that leave


@pytest.mark.parametrize("num_draft_tokens", [0, 3, None])
@pytest.mark.parametrize("how", ["cancel", "disconnect", "deadline"])
async def test_nothing_is_left_when_a_client_leaves(how: str, num_draft_tokens: int | None) -> None:
    async with stack() as s:
        for step in range(4):
            hold_at = s.target.num_steps + step
            request = greedy(num_draft_tokens, max_tokens=400, n=2)
            s.target.gate.set()
            async with connect(s.address) as channel:
                await channel.channel_ready()
                stub = inference_pb2_grpc.InferenceStub(channel)
                call = stub.Generate(request, timeout=1.0 if how == "deadline" else None)
                reading = asyncio.create_task(read_all(call))
                await until(lambda hold_at=hold_at: s.target.num_steps >= hold_at and s.target.num_sequences > 0, "on")  # type: ignore[misc]
                s.target.gate.clear()
                if how == "cancel":
                    call.cancel()
                elif how == "disconnect":
                    await channel.close()
                code = await reading
            assert code is (grpc.StatusCode.DEADLINE_EXCEEDED if how == "deadline" else grpc.StatusCode.CANCELLED)
            await until(lambda: s.servicer.admission.num_running == 0, "no request runs")
            s.target.gate.set()
            await s.until_idle()
        assert (await s.generate(greedy(num_draft_tokens))).tokens == {0: GREEDY}


async def test_a_client_that_leaves_while_the_drafter_drafts_leaves_nothing() -> None:
    async with stack() as s:
        assert s.drafter is not None
        s.drafter.answer = Answer.HANG
        call = s.stub.Generate(greedy(3))
        reading = asyncio.create_task(read_all(call))
        drafter = s.drafter
        await until(lambda: drafter.num_asked > 0, "drafter asked")
        call.cancel()
        assert await reading is grpc.StatusCode.CANCELLED
        await s.until_idle()


@pytest.mark.parametrize("num_times", [1, 3, 5])
async def test_a_session_cancelled_before_its_first_step_leaves_nothing(num_times: int) -> None:
    async with stack() as s:
        s.target.gate.clear()
        tasks: list[asyncio.Task[None]] = []
        original = s.fleet.placer.place

        async def place_and_cancel(*args: Any) -> Any:
            placed = await original(*args)
            # In the very turn of the loop in which the sequences' tasks are made.
            cancel(num_times)
            return placed

        def cancel(num_left: int) -> None:
            # By the deadline and by the client, both at once: in every turn of the loop that it unwinds in.
            tasks[0].cancel()
            if num_left > 1:
                asyncio.get_running_loop().call_soon(cancel, num_left - 1)

        s.fleet.placer.place = place_and_cancel  # type: ignore[assignment, method-assign]
        session = _session(s)

        async def write(_: inference_pb2.GenerateResponse) -> None:
            raise AssertionError("nothing can have come")

        tasks.append(asyncio.create_task(session.run(write, lambda: None)))
        with pytest.raises(asyncio.CancelledError):
            await tasks[0]
        assert s.fleet.targets[0].num_lanes == 0
        await s.until_idle()


def _session(s: Stack) -> Session:
    tokenizer, telemetry = TextTokenizer(TOKENIZER), configure("outrider-router", None)
    options = parse_generate(greedy(3, n=2), tokenizer, ModelLimits(257, 512, frozenset({0})))
    usage = UsageMeter(RouterMetrics(telemetry.meter, "m"), "text_completion")
    return Session(options, s.fleet, tokenizer, usage, telemetry, b"", 1.0)


# Clients that do not read


@asynccontextmanager
async def unread(s: Stack, request: inference_pb2.GenerateRequest, num_bytes: int = 1024) -> AsyncIterator[Any]:
    """A call of a client that reads nothing yet, and for which no more than `num_bytes` are under way."""
    options = (*CHANNEL_OPTIONS, ("grpc.http2.lookahead_bytes", num_bytes), ("grpc.http2.bdp_probe", 0))
    async with grpc.aio.insecure_channel(s.address, options=options) as channel:
        call = inference_pb2_grpc.InferenceStub(channel).Generate(request)
        await until(lambda: bool(s.target.prefills), "prefill arrived")
        yield call
        call.cancel()


async def test_places_are_free_when_generation_ends_and_not_when_its_client_has_read_it() -> None:
    async with stack(max_running=1, max_waiting=0) as s, unread(s, greedy(3, max_tokens=400)) as call:
        await s.until_idle()
        assert (await s.generate()).tokens == {0: GREEDY}
        assert not call.done()
        # Late is not too late.
        assert (await read(call)).tokens == {0: plain_output(PROMPT, 400)}


async def test_a_client_that_falls_too_far_behind_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_queue, "_MAX_QUEUED_BYTES", 30_000)
    monkeypatch.setattr(edge, "_STATUS_SECONDS", 0.05)
    most: list[int] = []
    put = ChunkQueue.put

    def watched(self: ChunkQueue, chunk: inference_pb2.GenerateResponse) -> None:
        put(self, chunk)
        most.append(sum(chunk.ByteSize() for chunk in self._chunks))

    monkeypatch.setattr(ChunkQueue, "put", watched)
    async with stack() as s, unread(s, greedy(0, max_tokens=400, n=4)) as call:
        await s.until_idle()
        assert 100 < len(most) < 4 * 400, "not at once, and not at the end"
        assert max(most) <= 30_000
        await until(lambda: s.server._edge.num_active == 0, "the RPC has ended")
        with pytest.raises(grpc.aio.AioRpcError, match="too slow: more than 30000 bytes"):
            await read(call)
        assert await call.code() is grpc.StatusCode.ABORTED


async def test_a_client_that_reads_nothing_for_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_queue, "_WRITE_SECONDS", 2.0)
    monkeypatch.setattr(edge, "_STATUS_SECONDS", 0.05)
    held_up = asyncio.Event()
    put = ChunkQueue.put

    def watched(self: ChunkQueue, chunk: inference_pb2.GenerateResponse) -> None:
        put(self, chunk)
        if len(self._chunks) == 1000:
            # Generation is far from its end, and stays there.
            s.target.gate.clear()
            held_up.set()

    monkeypatch.setattr(ChunkQueue, "put", watched)
    async with stack(max_running=1) as s, unread(s, greedy(0, max_tokens=400, n=8)) as call:
        await held_up.wait()
        await until(lambda: s.servicer.admission.num_running == 0, "its place is free while it would be going on")
        s.target.gate.set()
        await s.until_idle()
        assert s.target.num_steps < 400
        await until(lambda: s.server._edge.num_active == 0, "the RPC has ended")
        with pytest.raises(grpc.aio.AioRpcError, match="read nothing for 2 s"):
            await read(call)
        assert await call.code() is grpc.StatusCode.ABORTED


@pytest.mark.parametrize("num_bytes", [5, 1024])
async def test_a_client_that_does_not_even_read_the_first_chunk_is_told_why(
    num_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunk_queue, "_MAX_QUEUED_BYTES", 30_000)
    monkeypatch.setattr(edge, "_STATUS_SECONDS", 0.05)
    async with stack() as s, unread(s, greedy(0, max_tokens=400, n=4), num_bytes) as call:
        await s.until_idle()
        await until(lambda: s.server._edge.num_active == 0, "the RPC has ended")
        assert await read_all(call) is grpc.StatusCode.ABORTED


async def test_a_drain_does_not_wait_for_a_client_that_does_not_read() -> None:
    async with stack() as s, unread(s, greedy(0, max_tokens=400)) as call:
        await s.until_idle()
        await asyncio.wait_for(s.server.drain(s.servicer.admission.drain, 0.1), 10)
        assert s.server._edge.num_active == 0
        assert await read_all(call) is not grpc.StatusCode.OK
