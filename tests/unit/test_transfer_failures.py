"""Transfers that fail: nothing wrong is taken for right, and blocks are never lost."""

from __future__ import annotations

import asyncio
import gc
import zlib
from collections.abc import Sequence
from typing import Any

import grpc
import pytest
from outrider.v1 import transfer_pb2, transfer_pb2_grpc

from shared.prefix.block_hash import hash_blocks
from shared.transfer import fetch as fetch_module
from shared.transfer.engine import BlockRead, TransferEngine, TransferFailed, TransferPeer
from shared.transfer.finish import finish
from shared.transfer.servicer import TransferServicer
from tests.support.kv_engine import KVEngine, kv_worker
from tests.support.kv_fetch import TICKET, begin_import, failure, prompt_of
from tests.support.machine import BLOCK_SIZE, ROOT, new_sequence


async def test_engines_that_have_nothing_in_common() -> None:
    async with kv_worker() as p, kv_worker(engines={"other": _Failing(None)}) as d:
        assert "FAILED_PRECONDITION: engines here are grpc, not other" in await failure(d, p.address, prompt_of(9))


async def test_blocks_of_other_tokens_are_refused() -> None:
    async with kv_worker() as p, kv_worker() as d:
        sequence = new_sequence([1, *prompt_of(9)], 1)
        await p.add(sequence, TICKET)
        assert "other blocks than those of these tokens" in await failure(d, p.address, prompt_of(10))
        await p.until_idle()


async def test_a_prompt_that_is_never_computed() -> None:
    async with kv_worker() as p, kv_worker() as d:
        p.engine.gate.clear()
        sequence = new_sequence(prompt_of(30), 1)
        adding = asyncio.create_task(p.add(sequence, TICKET))
        failing = asyncio.create_task(failure(d, p.address, prompt_of(30)))
        removing = asyncio.create_task(p.remove(sequence))
        await asyncio.sleep(0)
        p.engine.gate.set()
        await asyncio.gather(adding, removing)
        # Computed in one step before it was removed, or never.
        if not sequence.finish:
            assert "NOT_FOUND" in await failing
        else:
            failing.cancel()


class Liar(transfer_pb2_grpc.TransferServicer):
    """Offers two full blocks and one without a hash, `again`: and another, which hold `num_tokens` in all."""

    def __init__(self, hashes: list[bytes], block_bytes: int, num_tokens: int, again: bool) -> None:
        self._hashes = hashes
        self._block_bytes = block_bytes
        self._num_tokens = num_tokens
        self._again = again

    async def Fetch(self, request_iterator: Any, context: Any) -> Any:
        accepted = transfer_pb2.FetchAccepted(fetch_id=b"f", engine="grpc", lease_seconds=9)
        yield transfer_pb2.FetchResponse(accepted=accepted)
        full = transfer_pb2.BlocksReady(blocks=[0, 1], block_hashes=b"".join(self._hashes[:2]))
        yield transfer_pb2.FetchResponse(ready=full)
        for block in (2, 3)[: 1 + self._again]:
            yield transfer_pb2.FetchResponse(ready=transfer_pb2.BlocksReady(blocks=[block]))
        yield transfer_pb2.FetchResponse(complete=self._num_tokens)
        async for request in request_iterator:
            if request.HasField("done"):
                break
        yield transfer_pb2.FetchResponse(confirmed=transfer_pb2.Confirmed())

    async def Read(self, request: Any, context: Any) -> Any:
        payload = bytes(self._block_bytes * len(request.blocks))
        yield transfer_pb2.BlockChunk(payload=payload, checksum=zlib.crc32(payload))


@pytest.mark.parametrize(
    ("num_tokens", "again"), [(3 * BLOCK_SIZE, False), (2 * BLOCK_SIZE, False), (2 * BLOCK_SIZE + 1, True)]
)
async def test_counts_that_are_not_of_these_blocks_are_refused(num_tokens: int, again: bool) -> None:
    async with kv_worker() as d:
        prompt = prompt_of(3 * BLOCK_SIZE)
        hashes = hash_blocks(prompt, BLOCK_SIZE, ROOT)
        server = grpc.aio.server()
        liar = Liar(hashes, d.engine.pool.block_num_bytes, num_tokens, again)
        register: Any = transfer_pb2_grpc.add_TransferServicer_to_server
        register(liar, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            why = await failure(d, f"127.0.0.1:{port}", prompt)
        finally:
            await server.stop(None)
        assert "the peer counts" in why or "other blocks" in why


async def test_a_peer_that_dies() -> None:
    async with kv_worker() as d:
        async with kv_worker() as p:
            p.engine.gate.clear()
            address = p.address
            adding = asyncio.create_task(p.add(new_sequence(prompt_of(30), 1), TICKET))
            failing = asyncio.create_task(failure(d, address, prompt_of(30)))
            await asyncio.sleep(0.05)
            await p.server.stop()
            why = await failing
            assert "UNAVAILABLE" in why or "CANCELLED" in why
            p.engine.gate.set()
            await adding
        assert "UNAVAILABLE" in await failure(d, address, prompt_of(30))


async def test_a_peer_that_falls_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch_module, "_SILENCE_SECONDS", 0.2)
    monkeypatch.setattr(fetch_module, "_RENEW_SECONDS", 0.05)

    async def swallow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await reader.read(65536):
                pass
        finally:
            writer.close()

    async with await asyncio.start_server(swallow, "127.0.0.1", 0) as black_hole:
        port = black_hole.sockets[0].getsockname()[1]
        async with kv_worker() as d:
            why = await failure(d, f"127.0.0.1:{port}", prompt_of(9))
            assert "does not answer within" in why or "UNAVAILABLE" in why


async def test_no_room_for_what_comes() -> None:
    async with kv_worker() as p, kv_worker(KVEngine(num_blocks=4)) as d:
        sequence = new_sequence(prompt_of(5 * BLOCK_SIZE), 1)
        await p.add(sequence, TICKET)
        assert "no room for what comes" in await failure(d, p.address, prompt_of(5 * BLOCK_SIZE))
        await p.until_idle()


class _Failing(TransferEngine):
    """Reads nothing, or hangs until `cancelled`, and then a while longer."""

    name = "other"

    def __init__(self, error: Exception | None) -> None:
        self._error = error
        self.reading = asyncio.Event()
        self.still_writing = asyncio.Event()

    @property
    def metadata(self) -> bytes:
        return b""

    async def peer(self, address: str, metadata: bytes) -> TransferPeer:
        return _FailingPeer(self)

    async def close(self) -> None:
        pass


class _FailingPeer(TransferPeer):
    def __init__(self, engine: _Failing) -> None:
        self._engine = engine

    async def read(self, fetch_id: bytes, reads: Sequence[BlockRead]) -> None:
        self._engine.reading.set()
        if self._engine._error is not None:
            raise self._engine._error
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await self._engine.still_writing.wait()
            raise


async def test_a_read_that_fails() -> None:
    engine = _Failing(TransferFailed("a cable was cut"))
    async with kv_worker() as p, kv_worker(engines={"other": engine}) as d:
        p.servicer._engines = {"other": engine}
        await p.add(new_sequence(prompt_of(30), 1), TICKET)
        assert await failure(d, p.address, prompt_of(30)) == "a cable was cut"
        await p.until_idle()


async def test_cancelled_in_the_middle_of_a_read_blocks_stay_until_it_has_ended() -> None:
    engine = _Failing(None)
    async with kv_worker() as p, kv_worker(engines={"other": engine}) as d:
        p.servicer._engines = {"other": engine}
        await p.add(new_sequence(prompt_of(30), 1), TICKET)
        kv_import = await begin_import(d, prompt_of(30))
        fetching = asyncio.create_task(d.fetcher.fetch(kv_import, p.address, TICKET))
        await engine.reading.wait()
        fetching.cancel()
        await d.loop.ask(lambda: d.engine.scheduler.imports.drop(kv_import))
        for _ in range(20):
            await asyncio.sleep(0)
        assert (await d.loop.ask(d.engine.blocks.counts)).owned == 8
        engine.still_writing.set()
        with pytest.raises(asyncio.CancelledError):
            await fetching
        await d.until_idle()
        await p.until_idle()


async def test_chunks_are_checked() -> None:
    async with kv_worker() as p, kv_worker() as d:
        honest = p.servicer._chunks

        def altered(blocks: Sequence[int]) -> list[transfer_pb2.BlockChunk]:
            chunks = honest(blocks)
            chunks[-1].payload = chunks[-1].payload[:-1] + bytes([chunks[-1].payload[-1] ^ 1])
            return chunks

        p.servicer._chunks = altered  # type: ignore[method-assign]
        await p.add(new_sequence(prompt_of(30), 1), TICKET)
        assert "checksum" in await failure(d, p.address, prompt_of(30))
        p.servicer._chunks = lambda blocks: honest(blocks)[:0]  # type: ignore[method-assign]
        await p.add(new_sequence(prompt_of(30), 1), b"u" * 16)
        assert "less came" in await failure(d, p.address, prompt_of(30), b"u" * 16)


async def test_a_peer_that_ends_a_fetch_in_order_before_it_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """The call may be done then when the reader has more to say."""

    async def end_early(_: TransferServicer, requests: Any, context: Any) -> None:
        accepted = transfer_pb2.FetchAccepted(fetch_id=b"f", engine="grpc")
        await context.write(transfer_pb2.FetchResponse(accepted=accepted))
        await context.write(transfer_pb2.FetchResponse(complete=0))

    monkeypatch.setattr(TransferServicer, "Fetch", end_early)
    async with kv_worker() as p, kv_worker() as d:
        for _ in range(30):
            # In its own words, or in gRPC's: whoever notices first.
            await failure(d, p.address, prompt_of(30))


async def test_what_fails_behind_a_cancellation_is_not_said_to_be_lost(caplog: pytest.LogCaptureFixture) -> None:
    go_on = asyncio.Event()

    async def fail() -> None:
        await go_on.wait()
        raise TransferFailed("late")

    waiting = asyncio.create_task(finish(fail()))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.sleep(0)
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    del waiting
    gc.collect()
    assert "never retrieved" not in caplog.text
