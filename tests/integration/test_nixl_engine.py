"""Blocks between the pools of two processes by nixl, and what becomes of a read whose peer stops, dies or is new."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from shared.engine.kv_pool import KVPool, KVShape
from shared.transfer.engine import BlockRead, TransferFailed
from shared.transfer.nixl import peer as nixl_peer
from shared.transfer.nixl.engine import NixlEngine
from shared.transfer.nixl.library import nixl_available

pytestmark = pytest.mark.timeout(120)
needs_nixl = pytest.mark.skipif(not nixl_available(), reason="nixl cannot be imported: install outrider[nixl]")

NUM_BLOCKS = 512
SHAPE = KVShape(8, 4, 64, 64)
BFLOAT16 = torch.bfloat16
# Longer than any read that gets on takes.
BOUND_SECONDS = 30.0

Reader = Callable[..., NixlEngine]
Start = Callable[..., "Worker"]


def new_pool(seed: int | None = None, dtype: torch.dtype = BFLOAT16, block_size: int = 16) -> KVPool:
    """A pool of blocks of 128 KiB (bfloat16); zeros without a seed."""
    pool = KVPool(SHAPE, NUM_BLOCKS, block_size, dtype, torch.device("cpu"))
    if seed is not None:
        pool.data.view(torch.uint8).random_(0, 256, generator=torch.Generator().manual_seed(seed))
    return pool


def serve(pipe: Connection, seed: int, dtype: torch.dtype, environment: dict[str, str]) -> None:
    """Another process: can be read from until the pipe says anything; then tells what processor time it took idle."""
    os.environ.update(environment)
    engine = NixlEngine(new_pool(seed, dtype), f"worker-{os.getpid()}")
    before = time.process_time()
    pipe.send(engine.metadata)
    pipe.recv()
    pipe.send(time.process_time() - before)
    asyncio.run(engine.close())


class Worker:
    """A process with a pool of random bytes, and the bytes."""

    def __init__(self, seed: int = 1, dtype: torch.dtype = BFLOAT16) -> None:
        # Forked from a process that has torch, not nixl, whose threads would be lost.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["shared.transfer.nixl.engine"])
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, seed, dtype, dict(os.environ)), daemon=True)
        self.process.start()
        theirs.close()
        assert self._pipe.poll(60), "the worker has not started"
        self.metadata: bytes = self._pipe.recv()
        self.pool = new_pool(seed, dtype)

    def send_signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)
        if number == signal.SIGSTOP:
            # It is no child of ours, to be waited for.
            while Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
                time.sleep(0.001)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def idle_seconds(self) -> float:
        """Ends it. Processor time since it began to serve."""
        self._pipe.send(None)
        assert self._pipe.poll(60)
        seconds: float = self._pipe.recv()
        self.process.join()
        return seconds


@pytest.fixture
def start() -> Iterator[Start]:
    workers: list[Worker] = []

    def start_one(*args: Any) -> Worker:
        workers.append(Worker(*args))
        return workers[-1]

    yield start_one
    for worker in workers:
        worker.kill()


@pytest.fixture(scope="module")
def shared_worker() -> Iterator[Worker]:
    """For tests that leave it as it is."""
    worker = Worker()
    yield worker
    worker.kill()


@pytest.fixture
async def reader() -> Any:
    engines: list[NixlEngine] = []

    def new_engine(pool: KVPool) -> NixlEngine:
        engines.append(NixlEngine(pool, f"reader-{os.getpid()}-{time.monotonic_ns()}"))
        return engines[-1]

    yield new_engine
    for engine in engines:
        await engine.close()


@pytest.fixture
def over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes go over TCP, as nobody should have it: then a peer that stops does stop a read."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.setenv("UCX_PROTO_EMULATION_ENABLE", "y")


ALL = [BlockRead(block, block) for block in range(NUM_BLOCKS)]


def assert_read(source: KVPool, destination: KVPool, reads: Sequence[BlockRead]) -> None:
    """Every block is where it should be, and no other was written to."""
    expected = torch.zeros_like(destination.data).view(torch.uint8)
    for read in reads:
        expected[read.destination] = source.data[read.source].view(torch.uint8)
    assert torch.equal(destination.data.view(torch.uint8), expected)


async def within_bound(read: Coroutine[Any, Any, Any]) -> Any:
    async with asyncio.timeout(BOUND_SECONDS):
        return await read


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


# Peers that are no more


@needs_nixl
async def test_a_worker_restarted_under_the_same_address(start: Start, reader: Reader) -> None:
    old, pool = start(1), new_pool()
    engine = reader(pool)
    old_peer = await engine.peer("worker:1", old.metadata)
    await old_peer.read(b"", ALL[:10])
    old.kill()
    new = start(2)
    peer = await engine.peer("worker:1", new.metadata)
    assert peer is not old_peer
    await peer.read(b"", ALL[:20])
    assert_read(new.pool, pool, ALL[:20])
    with pytest.raises(TransferFailed):
        await within_bound(old_peer.read(b"", ALL[20:]))
    with pytest.raises(TransferFailed):
        await within_bound(engine.peer("worker:1", old.metadata))
    assert await engine.peer("worker:1", new.metadata) is peer
    await peer.read(b"", ALL[:20])
    assert_read(new.pool, pool, ALL[:20])


@needs_nixl
@pytest.mark.parametrize("seconds", [0.0, 0.05, 0.2])
async def test_a_peer_killed_in_mid_read(seconds: float, shared_worker: Worker, start: Start, reader: Reader) -> None:
    worker, pool = start(2), new_pool()
    engine = reader(pool)
    peer, other = await engine.peer("w:1", worker.metadata), await engine.peer("w:2", shared_worker.metadata)

    async def read_on() -> None:
        while True:
            await peer.read(b"", ALL)

    reading = [asyncio.create_task(within_bound(read_on())) for _ in range(2)]
    await asyncio.sleep(seconds)
    worker.kill()
    for task in reading:
        with pytest.raises(TransferFailed):
            await task
    pool.data.zero_()
    await other.read(b"", ALL)
    assert_read(shared_worker.pool, pool, ALL)


@needs_nixl
async def test_a_stopped_worker_can_be_read_from(start: Start, reader: Reader) -> None:
    """Its memory is there, and its process not needed."""
    worker, pool = start(), new_pool()
    peer = await reader(pool).peer("worker:1", worker.metadata)
    # UCX may settle on another way once more after its first transfer, which takes both processes.
    await peer.read(b"", ALL)
    pool.data.zero_()
    worker.send_signal(signal.SIGSTOP)
    await within_bound(peer.read(b"", ALL))
    assert_read(worker.pool, pool, ALL)


@needs_nixl
async def test_a_worker_that_does_not_answer_at_first(
    monkeypatch: pytest.MonkeyPatch, start: Start, reader: Reader
) -> None:
    monkeypatch.setattr(nixl_peer, "_CONNECT_SECONDS", 0.5)
    worker, pool = start(), new_pool()
    engine = reader(pool)
    worker.send_signal(signal.SIGSTOP)
    asking = [asyncio.create_task(engine.peer("worker:1", worker.metadata)) for _ in range(3)]
    await asyncio.sleep(0.1)
    asking[0].cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking[0]
    for task in asking[1:]:
        with pytest.raises(TransferFailed, match="no answer within"):
            await task
    worker.send_signal(signal.SIGCONT)
    await asyncio.sleep(0.5)
    assert not pool.data.any()
    monkeypatch.undo()
    peer = await engine.peer("worker:1", worker.metadata)
    await peer.read(b"", ALL)
    assert_read(worker.pool, pool, ALL)


@needs_nixl
async def test_a_worker_that_no_direct_way_leads_to(
    monkeypatch: pytest.MonkeyPatch, start: Start, reader: Reader
) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    worker, pool = start(), new_pool()
    engine = reader(pool)
    for _ in range(3):
        with pytest.raises(TransferFailed):
            await engine.peer("worker:1", worker.metadata)
    assert worker.process.is_alive()


@needs_nixl
async def test_peers_not_read_from_are_forgotten(
    monkeypatch: pytest.MonkeyPatch, shared_worker: Worker, start: Start, reader: Reader
) -> None:
    pool, other = new_pool(), start(2)
    engine = reader(pool)
    idle = await engine.peer("worker:1", shared_worker.metadata)
    await idle.read(b"", ALL)
    await engine.peer("worker:2", other.metadata)
    await idle.read(b"", ALL)
    monkeypatch.setattr(nixl_peer, "_IDLE_SECONDS", 0.0)
    await engine.peer("worker:2", other.metadata)
    with pytest.raises(TransferFailed, match="given up"):
        await idle.read(b"", ALL)
    pool.data.zero_()
    await (await engine.peer("worker:1", shared_worker.metadata)).read(b"", ALL)
    assert_read(shared_worker.pool, pool, ALL)


# Reads that are cancelled, or do not end


@needs_nixl
async def test_cancelled_in_mid_read(monkeypatch: pytest.MonkeyPatch, shared_worker: Worker, reader: Reader) -> None:
    pool = new_pool()
    monkeypatch.setattr(nixl_peer, "_PART_BYTES", pool.block_num_bytes)
    peer = await reader(pool).peer("worker:1", shared_worker.metadata)
    reading = asyncio.create_task(peer.read(b"", ALL))
    while not pool.data[NUM_BLOCKS // 4].any():  # noqa: ASYNC110 - a transfer does not tell how far it is
        await asyncio.sleep(0)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    written = pool.data.view(torch.uint8).clone()
    assert not written[-1].any(), "read to its end"
    await asyncio.sleep(0.2)
    assert torch.equal(written, pool.data.view(torch.uint8))
    await peer.read(b"", ALL)
    assert_read(shared_worker.pool, pool, ALL)


@needs_nixl
@pytest.mark.usefixtures("over_tcp")
async def test_cancelled_it_still_ends_before_it_is_over(start: Start, reader: Reader) -> None:
    worker, pool = start(), new_pool()
    peer = await reader(pool).peer("worker:1", worker.metadata)
    await peer.read(b"", ALL[:1])
    worker.send_signal(signal.SIGSTOP)
    reading = asyncio.create_task(peer.read(b"", ALL))
    for _ in range(3):
        await asyncio.sleep(0.1)
        reading.cancel()
    await asyncio.sleep(0.5)
    assert not reading.done()
    worker.send_signal(signal.SIGCONT)
    with pytest.raises(asyncio.CancelledError):
        await within_bound(reading)  # type: ignore[arg-type]
    assert_read(worker.pool, pool, ALL)


@needs_nixl
@pytest.mark.usefixtures("over_tcp")
@pytest.mark.parametrize("cancel", [False, True], ids=["waited for", "cancelled"])
async def test_a_read_that_does_not_end(
    monkeypatch: pytest.MonkeyPatch, cancel: bool, shared_worker: Worker, start: Start, reader: Reader
) -> None:
    """It fails, and whatever its peer does later, nothing is written."""
    monkeypatch.setattr(nixl_peer, "_PART_SECONDS", 1.0)
    worker, other, pool = start(), start(2), new_pool()
    engine = reader(pool)
    peer, another = await engine.peer("worker:1", worker.metadata), await engine.peer("worker:2", other.metadata)
    metadata = engine.metadata
    worker.send_signal(signal.SIGSTOP)
    reading = asyncio.create_task(peer.read(b"", ALL))
    await asyncio.sleep(0.2)
    if cancel:
        reading.cancel()
    with pytest.raises(asyncio.CancelledError if cancel else TransferFailed):
        await within_bound(reading)  # type: ignore[arg-type]
    pool.data.zero_()
    worker.send_signal(signal.SIGCONT)
    await asyncio.sleep(1)
    assert not pool.data.any()
    # Everybody has to be asked for again; whoever reads from us has to know, too.
    assert engine.metadata != metadata
    with pytest.raises(TransferFailed):
        await another.read(b"", ALL)
    # The woken worker still pushes what it was asked for: this may take its time.
    monkeypatch.setattr(nixl_peer, "_PART_SECONDS", 30.0)
    await (await engine.peer("worker:2", other.metadata)).read(b"", ALL)
    assert_read(other.pool, pool, ALL)


@needs_nixl
@pytest.mark.usefixtures("over_tcp")
async def test_closing_ends_what_is_under_way(start: Start, reader: Reader) -> None:
    worker, pool = start(), new_pool()
    engine = reader(pool)
    peer = await engine.peer("worker:1", worker.metadata)
    worker.send_signal(signal.SIGSTOP)
    reading = asyncio.create_task(peer.read(b"", ALL))
    await asyncio.sleep(0.2)
    await engine.close()
    with pytest.raises(TransferFailed, match="closed"):
        await reading
    worker.send_signal(signal.SIGCONT)
    await asyncio.sleep(0.5)
    assert not pool.data.any()
    for again in (peer.read(b"", ALL), engine.peer("worker:1", worker.metadata)):
        with pytest.raises(TransferFailed):
            await again
    await engine.close()


@needs_nixl
async def test_a_call_that_fails_ends_no_other(
    caplog: pytest.LogCaptureFixture, shared_worker: Worker, reader: Reader
) -> None:
    pool = new_pool()
    engine = reader(pool)
    peer = await engine.peer("worker:1", shared_worker.metadata)

    def fail() -> None:
        raise ZeroDivisionError("no transfer's failure")

    engine._thread.call(fail)
    await within_bound(peer.read(b"", ALL))
    assert_read(shared_worker.pool, pool, ALL)
    assert "no transfer's failure" in caplog.text


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
