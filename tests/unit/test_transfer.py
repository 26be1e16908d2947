"""Blocks from one worker's pool to another's, over real gRPC: right, and none that is not needed."""

from __future__ import annotations

import asyncio
import random
import zlib
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any

import pytest
from outrider.v1 import transfer_pb2

from shared.engine.kv_import import KVImport
from shared.engine.sequence import Finish
from shared.engine.sequence import Sequence as EngineSequence
from shared.transfer import fetch as fetch_module
from shared.transfer.grpc import GrpcEngine
from shared.transfer.servicer import TransferServicer
from tests.support.kv_engine import KVEngine, KVWorker, kv_worker, note_import_turns
from tests.support.kv_fetch import TICKET, begin_import, prompt_of, until_drawn
from tests.support.machine import BLOCK_SIZE, ROOT, VOCAB_SIZE, decoded, new_sequence
from tests.support.router_stack import until


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
