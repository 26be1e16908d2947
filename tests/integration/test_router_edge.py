"""Who is admitted, authenticated and drained, and what a router says of workers that do not fit together."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from outrider.v1 import inference_pb2, inference_pb2_grpc

from services.router import server as router_server
from services.router.clients.request import check_generate
from services.router.clients.tenants import Tenants
from services.router.settings import RouterSettings
from services.router.text.tokenizer import TextTokenizer
from services.router.workers import fleet as fleet_module
from services.router.workers.fleet import Fleet
from shared.rpc.channel import connect
from shared.security.api_keys import ApiKey, digest_of, unlimited_keys
from shared.settings import StartupError
from tests.support.fake_drafter import FakeDrafter
from tests.support.fake_target import FakeTarget
from tests.support.router_stack import (
    FINGERPRINT,
    GREEDY,
    MAX_TOKENS,
    PROMPT,
    TOKENIZER,
    Output,
    Stack,
    greedy,
    read,
    stack,
    until,
)

pytestmark = pytest.mark.timeout(60)


# Admission, authentication, drain


async def test_a_full_queue_is_resource_exhausted() -> None:
    async with stack(max_running=1, max_waiting=1) as s:
        s.target.gate.clear()
        first = asyncio.create_task(s.generate())
        await until(lambda: s.servicer.admission.num_running == 1, "first runs")
        second = asyncio.create_task(s.generate())
        await until(lambda: s.servicer.admission.num_waiting == 1, "second waits")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await s.generate()
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        s.target.gate.set()
        assert (await first).tokens == (await second).tokens == {0: GREEDY}
        await s.until_idle()


async def test_a_deadline_in_the_queue_leaves_nothing() -> None:
    async with stack(max_running=1) as s:
        s.target.gate.clear()
        first = asyncio.create_task(s.generate())
        await until(lambda: s.servicer.admission.num_running == 1, "first runs")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await s.generate(timeout=0.1)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: s.servicer.admission.num_waiting == 0, "place in line given up")
        s.target.gate.set()
        assert (await first).tokens == {0: GREEDY}
        await s.until_idle()


LONG_TEXT = "def main(): pass\n" * 300


def long_request(max_tokens: int = 4) -> inference_pb2.GenerateRequest:
    """One that is tokenized in a thread."""
    return inference_pb2.GenerateRequest(text=LONG_TEXT, max_tokens=max_tokens, temperature=0.0)


class HeldTokenizer(TextTokenizer):
    """Tokenizes nothing until told to, and knows how much it was asked for, and in which threads."""

    def __init__(self) -> None:
        super().__init__(TOKENIZER)
        self.go_on = threading.Event()
        self.threads: list[int] = []

    def encode(self, text: str) -> tuple[int, ...]:
        self.threads.append(threading.get_ident())
        assert self.go_on.wait(30)
        return super().encode(text[:100])


@asynccontextmanager
async def held_stack(**settings: Any) -> AsyncIterator[tuple[Stack, HeldTokenizer]]:
    async with stack(**settings) as s:
        tokenizer = HeldTokenizer()
        s.servicer._tokenizer = tokenizer
        try:
            yield s, tokenizer
        finally:
            tokenizer.go_on.set()


async def test_who_is_refused_was_not_tokenized_and_bad_input_is_named_all_the_same() -> None:
    async with held_stack(max_running=1, max_waiting=0) as (s, tokenizer):
        s.target.gate.clear()
        first = asyncio.create_task(s.generate())
        await until(lambda: s.servicer.admission.num_running == 1, "first runs")
        for request, code in (
            (long_request(), grpc.StatusCode.RESOURCE_EXHAUSTED),
            (inference_pb2.GenerateRequest(text="short"), grpc.StatusCode.RESOURCE_EXHAUSTED),
            (greedy(n=17), grpc.StatusCode.INVALID_ARGUMENT),
            (greedy(stop=[""]), grpc.StatusCode.INVALID_ARGUMENT),
            (inference_pb2.GenerateRequest(text="x" * (1 << 20) + "x"), grpc.StatusCode.INVALID_ARGUMENT),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await s.generate(request, timeout=20)
            assert caught.value.code() is code
        assert tokenizer.threads == []
        s.target.gate.set()
        assert (await first).tokens == {0: GREEDY}


async def test_a_request_takes_as_many_places_as_it_has_sequences() -> None:
    async with stack(max_running=4) as s:
        s.target.gate.clear()
        three = asyncio.create_task(s.generate(greedy(0, n=3)))
        await until(lambda: s.servicer.admission.num_running == 3, "three run")
        two = asyncio.create_task(s.generate(greedy(0, n=2)))
        await until(lambda: s.servicer.admission.num_waiting == 1, "two wait")
        # More than there are places for: it runs alone.
        sixteen = asyncio.create_task(s.generate(greedy(0, n=16)))
        await until(lambda: s.servicer.admission.num_waiting == 2, "sixteen wait behind them")
        assert s.target.num_sequences == 3
        s.target.gate.set()
        for running, n in ((three, 3), (two, 2), (sixteen, 16)):
            assert (await running).tokens == dict.fromkeys(range(n), GREEDY)
        await s.until_idle()


async def test_lines_are_the_tenants_however_many_connections_they_open() -> None:
    keys = {"key-a": "anna", "key-b": "bert"}
    known = unlimited_keys(keys)
    salts = {name: Tenants(lambda: known, b"secret").cache_salt(name) for name in keys.values()}
    async with stack(max_running=1, keys=lambda: known) as s, AsyncExitStack() as channels:
        s.target.gate.clear()
        running: list[asyncio.Task[Output]] = []
        for number, key in enumerate(["key-a"] * 4 + ["key-b"]):
            channel = await channels.enter_async_context(connect(s.address))
            call = inference_pb2_grpc.InferenceStub(channel).Generate(
                greedy(), metadata=(("authorization", f"Bearer {key}"),)
            )
            running.append(asyncio.create_task(read(call)))
            await until(lambda number=number: s.servicer.admission.num_waiting == number, "in line")  # type: ignore[misc]
        s.target.gate.set()
        assert all(output.tokens == {0: GREEDY} for output in await asyncio.gather(*running))
        served = [prefill.cache_salt for prefill in s.target.prefills]
        assert served == [salts[name] for name in ("anna", "anna", "bert", "anna", "anna")]


async def test_tokenize_waits_in_a_line_of_its_own_and_not_without_end() -> None:
    request = inference_pb2.TokenizeRequest(text=LONG_TEXT)
    async with held_stack(max_waiting=1) as (s, tokenizer):
        calls = [asyncio.ensure_future(s.stub.Tokenize(request)) for _ in range(3)]
        done, others = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
        error = done.pop().exception()
        assert isinstance(error, grpc.aio.AioRpcError)
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert error.trailing_metadata()["grpc-status-details-bin"]
        # The one that waits costs no thread, and its deadline counts.
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await s.stub.Tokenize(inference_pb2.TokenizeRequest(text=LONG_TEXT), timeout=0.1)
        assert caught.value.code() in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.DEADLINE_EXCEEDED)
        await until(lambda: len(tokenizer.threads) == 1, "one is tokenized")
        # Generate is not held up by it: there is a thread left.
        generated = asyncio.create_task(s.generate(long_request()))
        await until(lambda: len(tokenizer.threads) == 2, "a prompt is tokenized beside it")
        assert threading.get_ident() not in tokenizer.threads
        # Short texts are not worth a line.
        tokenizer.go_on.set()
        assert len((await s.stub.Tokenize(inference_pb2.TokenizeRequest(text="x"))).token_ids) == 1
        for call in others:
            assert list((await call).token_ids) == list(TextTokenizer(TOKENIZER).encode(LONG_TEXT[:100]))
        assert len((await generated).tokens[0]) == 4
        await s.until_idle()


async def test_a_client_that_leaves_while_its_prompt_is_tokenized_keeps_its_place_until_the_thread_is_free() -> None:
    async with held_stack(max_running=1) as (s, tokenizer):
        call = s.stub.Generate(long_request())
        await until(lambda: len(tokenizer.threads) == 1, "it is tokenized")
        call.cancel()
        other = asyncio.create_task(s.generate())
        await until(lambda: s.servicer.admission.num_waiting == 1, "another waits")
        await asyncio.sleep(0.05)
        assert s.servicer.admission.num_running == 1
        assert s.target.prefills == []
        tokenizer.go_on.set()
        assert (await other).tokens == {0: GREEDY}
        await s.until_idle()


async def test_large_requests_are_checked_off_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []

    def noting(*args: Any) -> Any:
        threads.append(threading.get_ident())
        return check_generate(*args)

    monkeypatch.setattr(router_server, "check_generate", noting)
    unknown = b"\x0a\x06\x0a\x01u\x98\x06\x01"
    chat = unknown * 4096
    many = inference_pb2.GenerateRequest.FromString(b"\x1a\x80\x80\x02" + chat)
    async with stack() as s:
        for request, error in (
            (many, "chat.messages[0].field number is 99"),
            (
                inference_pb2.GenerateRequest(chat={"messages": [{"role": "u"}] * 4097}),
                "chat.messages is '4097 messages'",
            ),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await s.generate(request)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert (caught.value.details() or "").startswith(error)
        assert len(threads) == 2
        assert threading.get_ident() not in threads
        assert (await s.generate()).tokens == {0: GREEDY}
        assert threads[-1] == threading.get_ident()


async def test_only_a_known_key_is_served_and_its_salt_goes_along() -> None:
    known = unlimited_keys({"key-a": "anna"})
    async with stack(keys=lambda: known) as s:
        for metadata in ((), (("authorization", "Bearer anna"),), (("authorization", "Bearer key-b"),)):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await s.generate(metadata=metadata)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert s.target.prefills == []
        assert (await s.generate(metadata=(("authorization", "Bearer key-a"),))).tokens == {0: GREEDY}
        assert s.target.prefills[0].cache_salt == Tenants(lambda: known, b"secret").cache_salt("anna")


def bearer(key: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {key}"),)


async def refusal(s: Stack, request: inference_pb2.GenerateRequest, key: str) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await s.generate(request, metadata=bearer(key))
    return caught.value


async def test_a_key_has_so_many_requests_at_once() -> None:
    """Waiting ones and those of other connections as well; another key of the tenant is not counted with it."""
    first, second = ApiKey("anna", digest_of("a1"), max_requests=2), ApiKey("anna", digest_of("a2"), max_requests=2)
    async with stack(max_running=1, keys=lambda: {key.digest: key for key in (first, second)}) as s:
        s.target.gate.clear()
        held = [asyncio.create_task(s.generate(metadata=bearer("a1"))) for _ in range(2)]
        await until(lambda: s.servicer.admission.num_waiting == 1, "one runs, one waits")
        error = await refusal(s, greedy(), "a1")
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert error.details() == "this API key has 2 of 2 requests under way"
        assert b"RetryInfo" in dict(error.trailing_metadata() or ())["grpc-status-details-bin"]
        held.append(asyncio.create_task(s.generate(metadata=bearer("a2"))))
        await until(lambda: s.servicer.admission.num_waiting == 2, "the other key's waits too")
        held[0].cancel()
        s.target.gate.set()
        for task in held[1:]:
            assert (await task).tokens == {0: GREEDY}
        assert (await s.generate(metadata=bearer("a1"))).tokens == {0: GREEDY}


async def test_a_key_has_so_many_tokens_a_minute() -> None:
    """What is used too many is waited for; limits are those of the moment."""
    used = len(PROMPT) + MAX_TOKENS
    keys = {digest_of("a"): ApiKey("anna", digest_of("a"), tokens_per_minute=used - 1)}
    async with stack(keys=lambda: keys) as s:
        assert (await s.generate(metadata=bearer("a"))).tokens == {0: GREEDY}
        error = await refusal(s, greedy(), "a")
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert error.details() == f"this API key has used its {used - 1} tokens a minute"
        keys[digest_of("a")] = ApiKey("anna", digest_of("a"))
        assert (await s.generate(metadata=bearer("a"))).tokens == {0: GREEDY}
        keys.clear()
        keys[digest_of("b")] = ApiKey("bert", digest_of("b"))
        assert (await refusal(s, greedy(), "a")).code() is grpc.StatusCode.UNAUTHENTICATED


async def test_a_key_allows_so_many_output_tokens() -> None:
    key = ApiKey("anna", digest_of("a"), max_tokens=MAX_TOKENS)
    async with stack(keys=lambda: {key.digest: key}) as s:
        error = await refusal(s, greedy(max_tokens=MAX_TOKENS + 1), "a")
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert error.details() == f"max_tokens is {MAX_TOKENS + 1}: must be at most {MAX_TOKENS} with this API key"
        unsaid = greedy()
        unsaid.ClearField("max_tokens")
        assert (await s.generate(unsaid, metadata=bearer("a"))).tokens == {0: GREEDY}


async def test_bad_input_touches_no_worker() -> None:
    async with stack() as s:
        for request in (greedy(17), greedy(max_tokens=1000), greedy(temperature=-1.0), greedy(n=0)):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await s.generate(request)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert s.target.prefills == []


async def test_a_drain_finishes_what_runs() -> None:
    async with stack() as s:
        s.target.gate.clear()
        running = asyncio.create_task(s.generate(greedy(3)))
        await until(lambda: s.target.num_sequences == 1, "prefill arrived")
        drain = asyncio.create_task(s.server.drain(s.servicer.admission.drain, 20))
        await until(lambda: s.servicer.admission._draining, "drain begun")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await s.generate()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert not running.done()
        s.target.gate.set()
        assert (await running).tokens == {0: GREEDY}
        await drain


async def test_a_drain_that_takes_too_long_cancels_and_releases() -> None:
    async with stack() as s:
        s.target.gate.clear()
        running = asyncio.create_task(s.generate(greedy(3)))
        await until(lambda: s.target.num_sequences == 1, "prefill arrived")
        await s.server.drain(s.servicer.admission.drain, 0.05)
        with pytest.raises(grpc.aio.AioRpcError):
            await running
        s.target.gate.set()
        await s.until_idle()


async def test_sigterm_ends_the_process_when_what_runs_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    TOKENIZER.save_pretrained(tmp_path)
    monkeypatch.setattr(router_server, "configure_logging", lambda *_: None)
    target = FakeTarget(FINGERPRINT)
    await target.start()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    settings = RouterSettings.load(targets=[target.address], tokenizer=str(tmp_path), port=port, api_keys="anna=key-a")
    serving = asyncio.create_task(router_server.serve(settings))
    try:
        async with connect(f"127.0.0.1:{port}") as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            await until(lambda: bool(target.streams), "worker connected")
            target.gate.clear()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await read(stub.Generate(greedy(), metadata=(("authorization", "Bearer anna"),)))
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
            running = asyncio.create_task(read(stub.Generate(greedy(), metadata=(("authorization", "Bearer key-a"),))))
            await until(lambda: target.num_sequences == 1, "prefill arrived")
            os.kill(os.getpid(), signal.SIGTERM)
            with pytest.raises(grpc.aio.AioRpcError, match="draining"):
                await ask_for_ever(stub)
            assert not running.done()
            target.gate.set()
            assert (await running).tokens == {0: GREEDY}
            await asyncio.wait_for(serving, 10)
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        await target.stop()


async def ask_for_ever(stub: Any) -> None:
    while True:
        await stub.GetModelInfo(inference_pb2.GetModelInfoRequest(), metadata=(("authorization", "Bearer key-a"),))


# Workers that do not fit together


@pytest.mark.parametrize("which", ["target", "draft", "fingerprint"])
async def test_workers_that_do_not_fit_are_reported(which: str) -> None:
    workers: list[FakeTarget | FakeDrafter] = [
        FakeTarget(FINGERPRINT),
        FakeTarget(FINGERPRINT),
        FakeDrafter(FINGERPRINT),
    ]
    if which == "target":
        workers[0].info.tokenizer_fingerprint = "other"
    elif which == "draft":
        workers[2].info.tokenizer_fingerprint = "other"
    else:
        workers[1].info.fingerprint = "other"
    for worker in workers:
        await worker.start()
    fleet = Fleet([workers[0].address, workers[1].address], [workers[2].address], FINGERPRINT, 8, 16, None)
    fleet.start()
    try:
        expected = "one model" if which == "fingerprint" else f"the {which} worker's model"
        with pytest.raises(StartupError, match=expected):
            await asyncio.wait_for(fleet.failed, 10)
    finally:
        await asyncio.wait_for(fleet.close(), 5)
        for worker in workers:
            await worker.stop()


@pytest.mark.parametrize("which", ["target", "draft"])
async def test_a_worker_that_does_not_fit_and_comes_late_is_refused_and_the_others_serve_on(
    which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_module, "_STARTING_SECONDS", 0.0)
    first = FakeTarget(FINGERPRINT)
    late = FakeTarget(FINGERPRINT) if which == "target" else FakeDrafter(FINGERPRINT)
    late.info.tokenizer_fingerprint = "other"
    for worker in (first, late):
        await worker.start()
    targets = [first.address, *([late.address] if which == "target" else [])]
    fleet = Fleet(targets, [late.address] if which == "draft" else [], FINGERPRINT, 8, 16, None)
    link = fleet.targets[-1] if which == "target" else fleet.drafts[0]
    assert link is not None
    fleet._check_target(first.info)  # in service, long ago
    fleet.start()
    try:
        await until(lambda: fleet.targets[0].connected, "the first is connected")
        await until(lambda: late.num_described > 1, "the other is asked again")
        assert not fleet.failed.done()
        assert not link.connected
        late.info.tokenizer_fingerprint = FINGERPRINT
        await until(lambda: link.connected, "it fits now")
    finally:
        await asyncio.wait_for(fleet.close(), 5)
        for worker in (first, late):
            await worker.stop()
