"""Blocks between the pools of two processes by nixl: what is read, and what is refused."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

import pytest
import torch

from shared.transfer.engine import BlockRead, TransferFailed
from shared.transfer.nixl import peer as nixl_peer
from shared.transfer.nixl.engine import NixlEngine
from shared.transfer.nixl.library import nixl_available
from tests.support.nixl_worker import ALL, NUM_BLOCKS, Reader, Start, Worker, assert_read, needs_nixl, new_pool

pytestmark = pytest.mark.timeout(120)


# What is read


@needs_nixl
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn], ids=str)
async def test_blocks_come_to_their_places_as_they_are(dtype: torch.dtype, start: Start, reader: Reader) -> None:
    worker, pool = start(2, dtype), new_pool(dtype=dtype)
    peer = await reader(pool).peer("worker:1", worker.metadata)
    scattered = [BlockRead(3, 500), BlockRead(511, 0), BlockRead(0, 17), BlockRead(4, 18), BlockRead(5, 511)]
    run = [BlockRead(100 + i, 200 + i) for i in range(50)]
    backwards = [BlockRead(99 - i, 300 + i) for i in range(50)]
    await peer.read(b"", [*scattered, *run, *backwards])
    assert_read(worker.pool, pool, [*scattered, *run, *backwards])
    await peer.read(b"", [])


@needs_nixl
async def test_a_read_of_many_parts(monkeypatch: pytest.MonkeyPatch, shared_worker: Worker, reader: Reader) -> None:
    pool = new_pool()
    monkeypatch.setattr(nixl_peer, "_PART_BYTES", 3 * pool.block_num_bytes + 1)
    peer = await reader(pool).peer("worker:1", shared_worker.metadata)
    await peer.read(b"", ALL)
    assert_read(shared_worker.pool, pool, ALL)


@needs_nixl
async def test_reads_of_the_same_blocks_at_the_same_time(shared_worker: Worker, start: Start, reader: Reader) -> None:
    other, pool = start(3), new_pool()
    engine = reader(pool)
    # Those who ask for the same peer at once have one connection.
    peers = await asyncio.gather(
        *(engine.peer("worker:1", shared_worker.metadata) for _ in range(4)), engine.peer("worker:2", other.metadata)
    )
    assert len(set(peers)) == 2
    reads = [[BlockRead(block, 100 * i + block) for block in range(100)] for i in range(5)]
    await asyncio.gather(*(peer.read(b"", read) for peer, read in zip(peers, reads, strict=True)))
    for i, worker in enumerate([shared_worker] * 4 + [other]):
        for read in reads[i]:
            assert pool.read_block(read.destination) == worker.pool.read_block(read.source)


@needs_nixl
async def test_two_that_read_from_each_other(reader: Reader) -> None:
    pools = [new_pool(5), new_pool(6)]
    engines = [reader(pool) for pool in pools]
    halves = [ALL[: NUM_BLOCKS // 2], ALL[NUM_BLOCKS // 2 :]]
    peers = [await engines[0].peer("b", engines[1].metadata), await engines[1].peer("a", engines[0].metadata)]
    await asyncio.gather(*(peer.read(b"", half) for peer, half in zip(peers, halves, strict=True)))
    assert torch.equal(pools[0].data.view(torch.uint8), pools[1].data.view(torch.uint8))


@needs_nixl
async def test_the_event_loop_goes_on_meanwhile(shared_worker: Worker, reader: Reader) -> None:
    peer = await reader(new_pool()).peer("worker:1", shared_worker.metadata)
    reading = asyncio.create_task(peer.read(b"", ALL))
    num_turns = 0
    while not reading.done():
        await asyncio.sleep(0)
        num_turns += 1
    await reading
    assert num_turns > 10


@needs_nixl
async def test_no_processor_time_is_spent_on_waiting_to_be_asked(start: Start) -> None:
    worker = start()
    await asyncio.sleep(2)
    assert worker.idle_seconds() < 0.3


# What is refused


@needs_nixl
async def test_metadata_that_is_none(shared_worker: Worker, reader: Reader) -> None:
    engine, good = reader(new_pool()), shared_worker.metadata
    malformed = [b"", b"nixl", b"x" * 400, good + b"x", *(good[:length] for length in range(0, len(good), 7))]
    malformed += [bytes(byte ^ (i == at) for i, byte in enumerate(good)) for at in range(len(good))]
    for metadata in malformed:
        with pytest.raises(TransferFailed, match="metadata"):
            await engine.peer("worker:1", metadata)
    await engine.peer("worker:1", good)


@needs_nixl
async def test_blocks_of_another_size(shared_worker: Worker, reader: Reader) -> None:
    engine = reader(new_pool(block_size=32))
    with pytest.raises(TransferFailed, match="its blocks have 131072 bytes, ours 262144"):
        await engine.peer("worker:1", shared_worker.metadata)


@needs_nixl
async def test_oneself(reader: Reader) -> None:
    engine = reader(new_pool())
    with pytest.raises(TransferFailed):
        await engine.peer("worker:1", engine.metadata)


@needs_nixl
@pytest.mark.parametrize("read", [BlockRead(NUM_BLOCKS, 0), BlockRead(0, NUM_BLOCKS), BlockRead(-1, 0)], ids=str)
async def test_blocks_that_there_are_not(read: BlockRead, shared_worker: Worker, reader: Reader) -> None:
    pool = new_pool()
    engine = reader(pool)
    peer = await engine.peer("worker:1", shared_worker.metadata)
    with pytest.raises(TransferFailed):
        await peer.read(b"", [BlockRead(1, 1), read])
    assert not pool.data.any()
    await (await engine.peer("worker:1", shared_worker.metadata)).read(b"", ALL)
    assert_read(shared_worker.pool, pool, ALL)


def test_nixl_is_imported_for_an_engine_only() -> None:
    program = "import sys, shared.transfer.nixl.engine; sys.exit('nixl' in sys.modules)"
    subprocess.run(
        [sys.executable, "-c", program], check=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    )


def test_without_nixl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl", None)
    assert not nixl_available()
    with pytest.raises(ImportError, match=r"outrider\[nixl\]"):
        NixlEngine(new_pool(), "alone")
