"""Offers of blocks: tickets and leases, what may be asked for, and those who ask and leave."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from outrider.v1 import transfer_pb2, transfer_pb2_grpc

from shared.rpc.channel import connect
from tests.support.kv_engine import kv_worker
from tests.support.kv_fetch import TICKET, begin_import, failure, prompt_of, until_drawn
from tests.support.machine import BLOCK_SIZE, new_sequence
from tests.support.router_stack import read_all


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
