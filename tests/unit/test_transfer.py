"""Blocks from one worker's pool to another's, over real gRPC: right, or not at all, and never lost."""

from __future__ import annotations

import asyncio
import gc
import random
import zlib
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any

import grpc
import pytest
from outrider.v1 import transfer_pb2, transfer_pb2_grpc

from shared.engine.kv_import import KVImport
from shared.engine.sequence import Finish
from shared.engine.sequence import Sequence as EngineSequence
from shared.prefix.block_hash import hash_blocks
from shared.rpc.channel import connect
from shared.transfer import fetch as fetch_module
from shared.transfer.engine import BlockRead, TransferEngine, TransferFailed, TransferPeer
from shared.transfer.finish import finish
from shared.transfer.grpc import GrpcEngine
from shared.transfer.servicer import TransferServicer
from tests.support.kv_engine import KVEngine, KVWorker, kv_worker, note_import_turns
from tests.support.machine import BLOCK_SIZE, ROOT, VOCAB_SIZE, decoded, new_sequence
from tests.support.router_stack import read_all, until

TICKET = b"t" * 16


def prompt_of(length: int) -> list[int]:
    return [7 * i % VOCAB_SIZE for i in range(length)]


async def begin_import(worker: KVWorker, prompt: list[int]) -> KVImport:
    return await worker.loop.ask(lambda: worker.engine.scheduler.begin_import(prompt, ROOT))


async def until_drawn(sequences: Sequence[EngineSequence]) -> None:
    await until(lambda: all(len(each.token_ids) > each.num_prompt_tokens for each in sequences), "first tokens drawn")


async def go_on(worker: KVWorker, kv_import: KVImport, sequences: Sequence[EngineSequence]) -> None:
    """Decodes these to their ends on another worker, and holds them to plain decoding."""
    heirs = [EngineSequence(one.token_ids, one.num_prompt_tokens, one.params, ROOT, num_steps=99) for one in sequences]

    def begin() -> None:
        for heir in heirs:
            heir.kv_import = kv_import
            worker.engine.scheduler.add(heir)
        worker.engine.scheduler.imports.drop(kv_import)

    await worker.loop.ask(begin)
    await until(lambda: all(heir.finish is not None for heir in heirs), "all of them end")
    for heir in heirs:
        assert heir.finish is Finish.LENGTH
        assert heir.token_ids == decoded(heir.token_ids[: heir.num_prompt_tokens], heir.params)


@pytest.mark.parametrize("length", [1, BLOCK_SIZE, 4 * BLOCK_SIZE + 1, 150])
@pytest.mark.parametrize("budget", [9, 512])
@pytest.mark.parametrize("count", [1, 3])
async def test_a_prompt_goes_over_while_it_is_computed(length: int, budget: int, count: int) -> None:
    async with kv_worker(KVEngine(64, budget)) as p, kv_worker(KVEngine(64, budget)) as d:
        family = [new_sequence(prompt_of(length), 9, index, num_steps=1) for index in range(count)]
        family[0].forks = family[1:]
        kv_import = await begin_import(d, prompt_of(length))
        fetching = asyncio.create_task(d.fetcher.fetch(kv_import, p.address, TICKET))
        await p.add(family[0], TICKET)
        await until_drawn(family)
        fetched = await fetching
        assert fetched.num_tokens >= length - 1
        assert fetched.engine == "grpc"
        assert fetched.num_bytes == -(-fetched.num_tokens // BLOCK_SIZE) * d.engine.pool.block_num_bytes
        before = d.engine.num_computed
        await go_on(d, kv_import, family)
        # The first tokens, and of what was not handed over one each at the most; then what they drew.
        assert d.engine.num_computed - before <= count * (2 + 8)
        for sequence in family:
            await p.remove(sequence)
        await p.until_idle()
        await d.until_idle()


async def test_who_waits_for_blocks_is_in_the_step_after_they_came(monkeypatch: pytest.MonkeyPatch) -> None:
    async with kv_worker() as p, kv_worker() as d:
        sequence = new_sequence(prompt_of(70), 1, num_steps=1)
        await p.add(sequence, TICKET)
        await until_drawn([sequence])
        kv_import = await begin_import(d, prompt_of(70))
        turns = note_import_turns(d.engine, d.loop, monkeypatch)
        await d.fetcher.fetch(kv_import, p.address, TICKET)
        # Between the same two steps: a turn is what happens between two, and the step.
        assert turns["arrived"] == turns["end"] is not None


async def test_nothing_comes_that_is_here_already() -> None:
    async with kv_worker() as p, kv_worker() as d:
        prompt = prompt_of(5 * BLOCK_SIZE)
        shared = new_sequence(prompt[: 3 * BLOCK_SIZE], 1)
        await d.add(shared)
        sequence = new_sequence(prompt, 1, num_steps=1)
        await p.add(sequence, TICKET)
        await until_drawn([shared, sequence])
        kv_import = await begin_import(d, prompt)
        fetched = await d.fetcher.fetch(kv_import, p.address, TICKET)
        assert fetched.num_tokens == 5 * BLOCK_SIZE
        assert fetched.num_bytes == 2 * d.engine.pool.block_num_bytes


async def test_a_prefix_that_a_peer_has_cached() -> None:
    async with kv_worker() as p, kv_worker() as d:
        prompt = prompt_of(6 * BLOCK_SIZE)
        cached = new_sequence(prompt[: 4 * BLOCK_SIZE], 1)
        await p.add(cached)
        here = new_sequence(prompt[:BLOCK_SIZE], 1)
        await d.add(here)
        await until_drawn([cached, here])
        kv_import = await begin_import(d, prompt)
        fetched = await d.fetcher.fetch(kv_import, p.address, None)
        assert fetched.num_tokens == 4 * BLOCK_SIZE
        assert fetched.num_bytes == 3 * d.engine.pool.block_num_bytes
        sequence = new_sequence(prompt, 5)
        before = d.engine.num_computed
        await go_on(d, kv_import, [sequence])
        assert d.engine.num_computed - before == 2 * BLOCK_SIZE + 4
        await p.until_idle()
        await d.until_idle()


async def test_a_peer_without_the_prefix_brings_nothing() -> None:
    async with kv_worker() as p, kv_worker() as d:
        kv_import = await begin_import(d, prompt_of(20))
        assert (await d.fetcher.fetch(kv_import, p.address, None)).num_tokens == 0
        assert kv_import.ended
        await d.loop.ask(lambda: d.engine.scheduler.imports.drop(kv_import))
        await d.until_idle()


async def failure(d: KVWorker, address: str, prompt: list[int], ticket: bytes | None = TICKET) -> str:
    """Why a fetch failed; whatever it held is given back by then."""
    kv_import = await begin_import(d, prompt)
    with pytest.raises(TransferFailed) as caught:
        await d.fetcher.fetch(kv_import, address, ticket)
    assert kv_import.ended
    await d.loop.ask(lambda: d.engine.scheduler.imports.drop(kv_import))
    await d.until_idle()
    return str(caught.value)


async def test_a_fetch_that_ends_before_the_engine_answers_holds_nothing() -> None:
    async with kv_worker() as p:
        sequence = new_sequence(prompt_of(20), 1)
        await p.add(sequence)
        await until_drawn([sequence])
        await p.until_idle()
        hashes = list(sequence.block_hashes)
        p.engine.gate.clear()
        p.loop.submit(lambda: p.engine.scheduler.add(new_sequence([9, 9, 9], 1)))
        asked = asyncio.create_task(p.offers.cached(hashes))
        await asyncio.sleep(0.05)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        p.engine.gate.set()
        await p.until_idle()
        assert await p.loop.ask(lambda: len(p.engine.scheduler.exports)) == 0


async def test_unknown_tickets_and_those_taken_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared.transfer.offers._EARLY_SECONDS", 0.05)
    async with kv_worker() as p, kv_worker() as d:
        assert "NOT_FOUND: nothing is offered under ticket 7474" in await failure(d, p.address, prompt_of(9))
        sequence = new_sequence(prompt_of(9), 1)
        await p.add(sequence, TICKET)
        await until_drawn([sequence])
        await d.fetcher.fetch(await begin_import(d, prompt_of(9)), p.address, TICKET)
        async with kv_worker() as other:
            assert "was taken before" in await failure(other, p.address, prompt_of(9))


async def test_a_lease_that_nobody_takes_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    async with kv_worker(lease_seconds=0.05) as p, kv_worker() as d:
        sequence = new_sequence(prompt_of(9), 1)
        await p.add(sequence, TICKET)
        await until_drawn([sequence])
        await p.until_idle()
        assert "lease of 0.05 s is over" in await failure(d, p.address, prompt_of(9))


async def test_no_lease_runs_while_the_prompt_waits_to_be_computed() -> None:
    async with kv_worker(lease_seconds=0.05) as p, kv_worker() as d:
        p.engine.gate.clear()
        sequence = new_sequence(prompt_of(9), 1)
        kv_import = await begin_import(d, prompt_of(9))
        adding = asyncio.create_task(p.add(sequence, TICKET))
        await asyncio.sleep(0.2)
        [offer] = p.offers._held
        assert offer.held
        # From now on it runs, and is to be long enough.
        offer._lease_seconds = 10.0
        p.engine.gate.set()
        await adding
        assert (await d.fetcher.fetch(kv_import, p.address, TICKET)).num_tokens == 9


async def test_a_reader_that_falls_silent_loses_its_lease() -> None:
    async with kv_worker() as p, connect(p.address) as channel:
        sequence = new_sequence(prompt_of(9), 1)
        await p.add(sequence, TICKET)
        call: Any = transfer_pb2_grpc.TransferStub(channel).Fetch()
        begin = transfer_pb2.FetchBegin(layout=p.servicer._layout, engines=["grpc"], ticket=TICKET)
        await call.write(transfer_pb2.FetchRequest(begin=begin))
        accepted = (await call.read()).accepted
        await until_drawn([sequence])
        assert (await call.read()).HasField("ready")
        assert (await call.read()).complete == 9
        [offer] = p.offers._being_read.values()
        offer._lease_seconds = 0.1
        offer.renew()
        await p.until_idle()
        # Too late: what it read may be anything by now, and it is told so. Nor is it waited for any longer.
        with pytest.raises(grpc.aio.AioRpcError, match="the lease of"):
            await call.read()
        read = transfer_pb2_grpc.TransferStub(channel).Read(
            transfer_pb2.ReadRequest(fetch_id=accepted.fetch_id, blocks=[0])
        )
        assert await read_all(read) == grpc.StatusCode.NOT_FOUND


async def test_only_announced_blocks_are_read() -> None:
    async with kv_worker() as p, connect(p.address) as channel:
        sequence = new_sequence(prompt_of(9), 1)
        await p.add(sequence, TICKET)
        stub = transfer_pb2_grpc.TransferStub(channel)
        call: Any = stub.Fetch()
        begin = transfer_pb2.FetchBegin(layout=p.servicer._layout, engines=["grpc"], ticket=TICKET)
        await call.write(transfer_pb2.FetchRequest(begin=begin))
        accepted = (await call.read()).accepted
        ready = (await call.read()).ready
        others = sorted(set(range(64)) - set(ready.blocks))
        read = stub.Read(transfer_pb2.ReadRequest(fetch_id=accepted.fetch_id, blocks=[others[0]]))
        assert await read_all(read) == grpc.StatusCode.NOT_FOUND
        call.cancel()
        await p.until_idle()


@pytest.mark.parametrize("field", ["fingerprint", "model", "dtype", "block_size", "block_bytes"])
async def test_other_blocks_are_refused_with_both_values(field: str) -> None:
    async with kv_worker() as p, kv_worker() as d:
        ours = getattr(d.fetcher._layout, field)
        theirs = ours + "2" if isinstance(ours, str) else 2 * ours
        setattr(d.fetcher._layout, field, theirs)
        text = await failure(d, p.address, prompt_of(9))
        assert "FAILED_PRECONDITION" in text
        assert f"of {field} {ours!r}, not {theirs!r}" in text


@pytest.mark.parametrize(
    ("requests", "complaint"),
    [
        ([], "begin, as the first of a fetch"),
        ([transfer_pb2.FetchRequest(renew=transfer_pb2.Renew())], "begin, as the first of a fetch"),
        (["wanted"], "neither ticket nor prefix"),
        (["hashes"], "a multiple of 32"),
        (["first_block"], f"at most {2**31 // BLOCK_SIZE}"),
    ],
)
async def test_malformed_fetches_are_refused(requests: list[Any], complaint: str) -> None:
    async with kv_worker() as p, connect(p.address) as channel:
        begin = transfer_pb2.FetchBegin(layout=p.servicer._layout, engines=["grpc"])
        if requests == ["hashes"]:
            begin.prefix.block_hashes = bytes(33)
        if requests == ["first_block"]:
            begin.prefix.block_hashes = bytes(32)
            begin.first_block = 2**32 - 1
        made = [transfer_pb2.FetchRequest(begin=begin) if isinstance(each, str) else each for each in requests]
        call: Any = transfer_pb2_grpc.TransferStub(channel).Fetch(iter(made))
        assert await read_all(call) is grpc.StatusCode.INVALID_ARGUMENT
        assert complaint in await call.details()
        await p.until_idle()


async def test_who_leaves_before_it_is_done_gives_everything_back() -> None:
    async with kv_worker() as p, connect(p.address) as channel:
        await p.add(new_sequence(prompt_of(9), 1), TICKET)
        begin = transfer_pb2.FetchBegin(layout=p.servicer._layout, engines=["grpc"], ticket=TICKET)
        call: Any = transfer_pb2_grpc.TransferStub(channel).Fetch(iter([transfer_pb2.FetchRequest(begin=begin)]))
        assert await read_all(call) is grpc.StatusCode.UNAVAILABLE
        await p.until_idle()


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


async def test_several_fetches_at_once_while_both_go_on() -> None:
    async with kv_worker(KVEngine(256, 16)) as p, kv_worker(KVEngine(256, 16)) as d:

        async def one(number: int) -> None:
            prompt = [(number + 3 * i) % VOCAB_SIZE for i in range(30 + number)]
            ticket = bytes([number]) * 16
            sequence = new_sequence(prompt, 12, num_steps=1)
            kv_import = await begin_import(d, prompt)
            fetching = asyncio.create_task(d.fetcher.fetch(kv_import, p.address, ticket))
            await p.add(sequence, ticket)
            await until_drawn([sequence])
            await p.remove(sequence)
            await fetching
            await go_on(d, kv_import, [sequence])

        await asyncio.gather(*(one(number) for number in range(12)))
        await p.until_idle()
        await d.until_idle()


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


@pytest.mark.parametrize("seed", range(3))
async def test_chunks_may_be_cut_anywhere(seed: int) -> None:
    """Some hold the ends of several blocks, some none, some nothing."""
    rng, length = random.Random(seed), 9 * BLOCK_SIZE
    async with kv_worker() as p, kv_worker() as d:
        honest = p.servicer._chunks

        def cut_anew(blocks: Sequence[int]) -> list[transfer_pb2.BlockChunk]:
            content = b"".join(chunk.payload for chunk in honest(blocks))
            cuts = [0, *sorted(rng.randint(0, len(content)) for _ in range(20)), len(content)]
            payloads = [content[start:end] for start, end in pairwise(cuts)]
            return [transfer_pb2.BlockChunk(payload=each, checksum=zlib.crc32(each)) for each in payloads]

        p.servicer._chunks = cut_anew  # type: ignore[method-assign]
        sequence = new_sequence(prompt_of(length), 9, num_steps=1)
        kv_import = await begin_import(d, prompt_of(length))
        fetching = asyncio.create_task(d.fetcher.fetch(kv_import, p.address, TICKET))
        await p.add(sequence, TICKET)
        await until_drawn([sequence])
        assert (await fetching).num_tokens == length
        await go_on(d, kv_import, [sequence])
        await p.remove(sequence)
        await d.until_idle()


def test_engine_names() -> None:
    assert GrpcEngine.name == "grpc"


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


async def test_nothing_is_said_behind_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peer ends the call then, and a write that it overtakes would fail what went well."""
    monkeypatch.setattr(fetch_module, "_RENEW_SECONDS", 0.01)
    said: list[str] = []

    async def linger(_: TransferServicer, requests: Any, context: Any) -> None:
        accepted = transfer_pb2.FetchAccepted(fetch_id=b"f", engine="grpc")
        await context.write(transfer_pb2.FetchResponse(accepted=accepted))
        await context.write(transfer_pb2.FetchResponse(complete=0))
        with suppress(TimeoutError):
            async with asyncio.timeout(0.3):
                async for request in requests:
                    said.append(request.WhichOneof("request"))
        await context.write(transfer_pb2.FetchResponse(confirmed=transfer_pb2.Confirmed()))

    monkeypatch.setattr(TransferServicer, "Fetch", linger)
    async with kv_worker() as p, kv_worker() as d:
        await d.fetcher.fetch(await begin_import(d, prompt_of(30)), p.address, TICKET)
    assert said[-1] == "done"


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
