"""How fast KV goes from process to process, by each engine, against a copy in memory and nixl by itself."""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Any, Final

import grpc.aio
import torch
from outrider.v1 import transfer_pb2, transfer_pb2_grpc

from services.cli.launcher import worker_environment
from shared.prefix.block_hash import hash_blocks
from shared.rpc.channel import connect
from shared.transfer.engine import BlockRead, TransferPeer
from shared.transfer.fetch import Fetcher
from tests.benchmarks.errors import BenchmarkError
from tests.benchmarks.pools.block_source import (
    BlockSource,
    PoolEngine,
    block_source,
    fill,
    make_transfer_engines,
    new_pool,
    prompt_of,
)
from tests.benchmarks.pools.raw_nixl import RawAgent
from tests.support.kv_engine import KVWorker, kv_worker, layout_of
from tests.support.machine import BLOCK_SIZE, ROOT

COPY, RAW = "copy in memory", "nixl alone"
NUM_BLOCKS: Final = (8, 94, 512)
"""What is moved, in blocks: a short prefix, a prompt of 1,500 tokens, and one five times as long."""

_SEED = 0
# More than processors cache.
_MOST_CACHED_BYTES = 256 * 2**20

Method = Callable[[], Awaitable[float]]
"""Moves the blocks once; the seconds that took."""


@dataclass(frozen=True, slots=True)
class Rate:
    """So many bytes at once, by one method: the seconds of each turn."""

    method: str
    num_blocks: int
    num_bytes: int
    seconds: tuple[float, ...]

    @property
    def bytes_per_second(self) -> float:
        return self.num_bytes / median(self.seconds)


@dataclass(frozen=True, slots=True)
class TransferCosts:
    """A transfer of b bytes takes fixed_seconds + b / bytes_per_second."""

    fixed_seconds: float
    bytes_per_second: float


async def measure_transfers(turns: int) -> list[Rate]:
    """Moves each number of blocks by each method, in turns of any order, so that what disturbs one disturbs all.

    `engine`: blocks read by an engine as a worker has it; `fetch`: all that a worker does for a prefix of another's,
    from asking for it until its blocks count as here. Blocks come to places all over the pool, as in one that has been
    in use, and none of them is in the processor's caches: else each method would gain by the one before. Both ends are
    processes with the environment of workers. Raises BenchmarkError if anything else comes than was asked for.
    """
    command = [sys.executable, "-m", "tests.benchmarks.pools.transfer", str(turns)]
    process = await asyncio.create_subprocess_exec(*command, env=worker_environment(os.environ), stdout=PIPE)
    try:
        output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    if process.returncode:
        raise BenchmarkError("transfers could not be measured")
    return [Rate(**fields) for fields in json.loads(output)]


def transfer_costs(rates: Sequence[Rate]) -> TransferCosts:
    """Of a fetch by the best engine there is, from what a short prefix and a prompt took."""
    fetches = {each.num_blocks: each for each in rates if each.method == _fetch(_best(rates))}
    short, prompt = (fetches[count] for count in NUM_BLOCKS[:2])
    more_seconds = median(prompt.seconds) - median(short.seconds)
    if more_seconds <= 0:
        raise BenchmarkError("a prompt was not slower to fetch than a short prefix: the machine is busy")
    rate = (prompt.num_bytes - short.num_bytes) / more_seconds
    return TransferCosts(max(0.0, median(short.seconds) - short.num_bytes / rate), rate)


def main() -> None:
    """Measures in this process and one that it starts; its argument: how many turns. Prints the rates, as JSON."""
    # As a worker that has one core: nothing here is to be faster by a second one.
    torch.set_num_threads(1)
    rates = asyncio.run(_measure(int(sys.argv[1])))
    print(json.dumps([asdict(rate) for rate in rates]))


async def _measure(turns: int) -> list[Rate]:
    total = sum(NUM_BLOCKS)
    rates = []
    order = random.Random(_SEED)
    other_things = torch.zeros(_MOST_CACHED_BYTES, dtype=torch.uint8)
    with block_source(total, NUM_BLOCKS) as source:
        async with _reader(source, total) as reader:
            for count in NUM_BLOCKS:
                async with reader.methods(count) as methods:
                    for method in methods.values():
                        await reader.check(count, method)
                    seconds: dict[str, list[float]] = {name: [] for name in methods}
                    for _ in range(turns):
                        # In any order: the source is still busy with what went before by gRPC.
                        for name in order.sample(list(methods), len(methods)):
                            other_things.add_(1)
                            seconds[name].append(await methods[name]())
                num_bytes = count * reader.pool.block_num_bytes
                rates += [Rate(name, count, num_bytes, tuple(each)) for name, each in seconds.items()]
    return rates


def _best(rates: Sequence[Rate]) -> str:
    return "nixl" if any(each.method == RAW for each in rates) else "grpc"


def _engine(name: str) -> str:
    return f"{name} engine"


def _fetch(name: str) -> str:
    return f"{name} fetch"


class _Reader:
    """A worker's end. `destinations`: where its engines read to when they are measured alone."""

    def __init__(
        self,
        source: BlockSource,
        worker: KVWorker,
        raw: RawAgent | None,
        fetchers: Mapping[str, Fetcher],
        destinations: Sequence[int],
    ) -> None:
        self.pool = worker.engine.pool
        self._source = source
        self._worker = worker
        self._raw = raw
        self._fetchers = fetchers
        self._destinations = destinations
        # What the source has, to copy from and to compare with.
        self._content = new_pool(self.pool.num_blocks)
        fill(self._content)
        # Where the latest blocks came to.
        self._landed: list[int] = []

    @asynccontextmanager
    async def methods(self, count: int) -> AsyncIterator[dict[str, Method]]:
        """By name, while the source holds so many blocks for us."""
        reads = [
            BlockRead(source, destination)
            for source, destination in zip(self._source.blocks[count], self._destinations, strict=False)
        ]
        methods: dict[str, Method] = {COPY: partial(self._copy, count)}
        async with connect(self._source.address) as channel, self._held(channel, count) as fetch_id:
            for name, engine in self._worker.engines.items():
                peer = await engine.peer(self._source.address, self._source.metadata[name])
                methods[_engine(name)] = partial(self._read, peer, fetch_id, reads)
                methods[_fetch(name)] = partial(self._fetch, name, count)
            if self._raw is not None and self._source.raw is not None:
                prepared = self._raw.prepare(self._source.raw, *zip(*reads, strict=True))
                methods[RAW] = partial(self._read_raw, prepared, reads)
            yield methods

    async def check(self, count: int, method: Method) -> None:
        """Does it once, and looks at what came. Raises BenchmarkError."""
        self.pool.data.zero_()
        await method()
        for source, destination in zip(self._source.blocks[count], self._landed, strict=True):
            came, sent = self.pool.data[destination], self._content.data[source]
            if not torch.equal(came.view(torch.int32), sent.view(torch.int32)):
                raise BenchmarkError("other bytes came than the source has")

    async def _copy(self, count: int) -> float:
        first = self._source.blocks[count][0]
        began = time.perf_counter()
        self.pool.data[:count].copy_(self._content.data[first : first + count])
        seconds = time.perf_counter() - began
        self._landed = list(range(count))
        return seconds

    async def _read(self, peer: TransferPeer, fetch_id: bytes, reads: Sequence[BlockRead]) -> float:
        began = time.perf_counter()
        await peer.read(fetch_id, reads)
        seconds = time.perf_counter() - began
        self._landed = [read.destination for read in reads]
        return seconds

    async def _read_raw(self, prepared: int, reads: Sequence[BlockRead]) -> float:
        assert self._raw is not None
        self._landed = [read.destination for read in reads]
        return self._raw.read(prepared)

    async def _fetch(self, name: str, count: int) -> float:
        worker, prompt = self._worker, prompt_of(count)
        scheduler, blocks = worker.engine.scheduler, worker.engine.blocks
        began = time.perf_counter()
        kv_import = await worker.loop.ask(lambda: scheduler.begin_import(prompt, ROOT))
        fetched = await self._fetchers[name].fetch(kv_import, self._source.address, None)
        seconds = time.perf_counter() - began
        if (fetched.engine, fetched.num_tokens) != (name, len(prompt)):
            raise BenchmarkError(f"{fetched.num_tokens} of {len(prompt)} tokens were fetched, by {fetched.engine}")
        self._landed = list(kv_import.held)

        def forget() -> None:
            """What came is not to be found here the next time."""
            scheduler.imports.drop(kv_import)
            blocks.release(blocks.allocate(blocks.num_allocatable))

        await worker.loop.ask(forget)
        return seconds

    @asynccontextmanager
    async def _held(self, channel: grpc.aio.Channel, count: int) -> AsyncIterator[bytes]:
        """The name of a fetch that holds these blocks for as long as the lease: for engines that ask for one."""
        call: Any = transfer_pb2_grpc.TransferStub(channel).Fetch()
        begin = transfer_pb2.FetchBegin(layout=layout_of(self.pool), engines=list(self._worker.engines))
        begin.prefix.block_hashes = b"".join(hash_blocks(prompt_of(count), BLOCK_SIZE, ROOT))
        await call.write(transfer_pb2.FetchRequest(begin=begin))
        accepted: Any = await call.read()
        try:
            yield accepted.accepted.fetch_id
        finally:
            call.cancel()


@asynccontextmanager
async def _reader(source: BlockSource, num_blocks: int) -> AsyncIterator[_Reader]:
    engine = PoolEngine(num_blocks)
    # As in a pool that has been in use: what is allocated together does not lie together.
    scattered = engine.blocks.allocate(num_blocks)
    random.Random(_SEED).shuffle(scattered)
    engine.blocks.release(scattered)
    engines = make_transfer_engines(engine.pool)
    raw = RawAgent(f"raw-{os.getpid()}", engine.pool) if source.raw is not None else None
    async with kv_worker(engine, engines=engines) as worker:
        layout = layout_of(engine.pool)
        fetchers = {name: Fetcher(worker.loop, layout, {name: each}) for name, each in engines.items()}
        try:
            yield _Reader(source, worker, raw, fetchers, scattered)
        finally:
            for fetcher in fetchers.values():
                await fetcher.close()
            if raw is not None:
                raw.close()


if __name__ == "__main__":
    main()
