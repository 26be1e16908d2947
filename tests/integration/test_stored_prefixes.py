"""Prefixes in Redis, from end to end: kept by the worker that computed them, used by those that did not."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import cast

import pytest
from outrider.v1 import target_pb2
from redis.asyncio import Redis

from services.target.hand_over import HandOver
from services.target.stored_prefixes import StoredPrefixes
from shared.engine.engine import Engine, StepOutcome
from shared.engine.kv_import import KVImport
from shared.engine.loop import EngineLoop
from shared.engine.sequence import Sequence
from shared.models import DEMO_TARGET
from shared.prefix.block_hash import root_hash
from shared.prefix.store import PrefixStore
from shared.redis.server import RedisServer
from shared.sampling.params import SamplingParams
from shared.telemetry.metrics import WorkerMetrics
from shared.telemetry.tracing import configure
from shared.transfer.engine import TransferFailed
from shared.transfer.fetch import Fetched, Fetcher
from shared.transfer.offers import Offers
from shared.worker.stream import RouterStream
from tests.support.greedy import python_prompts, references
from tests.support.kv_engine import KVEngine, layout_of, note_import_turns
from tests.support.machine import BLOCK_SIZE
from tests.support.router_stack import until
from tests.support.service import generate, inference, running_stack, wait_until_idle

pytestmark = pytest.mark.timeout(120)

MODEL = "model"
ROOT = root_hash(MODEL, b"")
NUM_BLOCKS = 6
PROMPT = [3 * i % 61 for i in range(NUM_BLOCKS * BLOCK_SIZE + 1)]
MOST_BYTES = 64 << 20


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@dataclass
class Worker:
    """An engine that keeps what it computes, as a target worker does."""

    engine: KVEngine
    loop: EngineLoop
    store: PrefixStore
    stored: StoredPrefixes

    async def compute(self, sequence: Sequence) -> None:
        await self.loop.ask(lambda: self.engine.scheduler.add(sequence))
        await until(lambda: sequence.finish is not None, "computed")

    async def until_idle(self) -> None:
        def owned() -> int:
            self.engine.scheduler.check()
            return self.engine.blocks.counts().owned

        deadline = time.monotonic() + 20
        while num_owned := await self.loop.ask(owned):
            assert time.monotonic() < deadline, f"{num_owned} blocks are still owned"
            await asyncio.sleep(0.01)


@asynccontextmanager
async def worker(url: str, num_blocks: int = 64) -> AsyncIterator[Worker]:
    engine = KVEngine(num_blocks)
    engine.fingerprint = MODEL
    made: list[StoredPrefixes] = []

    def on_step(outcome: StepOutcome) -> None:
        made[0].on_stored(engine.blocks.take_events().stored)

    loop = EngineLoop(cast(Engine, engine), on_step, lambda: None)
    size = engine.pool.block_num_bytes
    store = PrefixStore(url, MODEL, size, max_bytes=MOST_BYTES, ttl_seconds=60, max_pending_bytes=MOST_BYTES)
    store.start()
    made.append(StoredPrefixes(loop, store))
    loop.start()
    try:
        yield Worker(engine, loop, store, made[0])
    finally:
        engine.gate.set()
        await made[0].close()
        loop.stop()


def sequence_of(token_ids: list[int]) -> Sequence:
    return Sequence(token_ids, len(token_ids), SamplingParams(max_tokens=1), ROOT, num_steps=1)


async def fetched(worker: Worker, token_ids: list[int]) -> Sequence:
    """A sequence computed behind what the store had of it."""
    kv_import = await worker.loop.ask(lambda: worker.engine.scheduler.begin_import(token_ids, ROOT))
    sequence = sequence_of(token_ids)
    sequence.kv_import = kv_import
    try:
        await worker.stored.fetch(kv_import)
    finally:
        await worker.compute(sequence)
        await worker.loop.ask(lambda: worker.engine.scheduler.imports.drop(kv_import))
        await worker.until_idle()
    return sequence


async def keep(first: Worker, token_ids: list[int]) -> None:
    """Computed there, and in Redis."""
    before = first.store.num_stored
    await first.compute(sequence_of(token_ids))
    await until(lambda: first.store.num_stored == before + len(token_ids) // BLOCK_SIZE, "stored")
    await first.until_idle()


async def until_stored(redis: RedisServer, num_blocks: int) -> None:
    client = Redis.from_url(redis.url)
    try:
        deadline = time.monotonic() + 20
        while (number := len(await client.keys("*:payload:*"))) < num_blocks:
            assert time.monotonic() < deadline, f"{number} of {num_blocks} blocks are in Redis"
            await asyncio.sleep(0.01)
    finally:
        await client.aclose()


def hold_copies(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Blocks are copied only once this is set."""
    go_on = threading.Event()
    read = worker.engine.pool.read_block

    def held(block: int) -> bytes:
        go_on.wait()
        return read(block)

    monkeypatch.setattr(worker.engine.pool, "read_block", held)
    return go_on


async def test_what_one_worker_computed_another_need_not(redis: RedisServer) -> None:
    async with worker(redis.url) as first, worker(redis.url) as second:
        await keep(first, PROMPT)
        # The engine proves that every block holds the past that it is said to.
        sequence = await fetched(second, [*PROMPT, 7, 8])
        assert sequence.num_cached_tokens == NUM_BLOCKS * BLOCK_SIZE
        assert second.engine.num_computed == 3
        assert second.stored.counts() == {"stored": 0, "dropped": 0, "hit": NUM_BLOCKS, "corrupt": 0}


async def test_who_waits_for_stored_blocks_is_in_the_step_after_they_came(
    redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with worker(redis.url) as first, worker(redis.url) as second:
        await keep(first, PROMPT)
        turns = note_import_turns(second.engine, second.loop, monkeypatch)
        await fetched(second, [*PROMPT, 7])
        assert turns["arrived"] == turns["end"] is not None


async def test_what_is_here_is_not_fetched(redis: RedisServer) -> None:
    async with worker(redis.url) as first, worker(redis.url) as second:
        await keep(first, PROMPT)
        await second.compute(sequence_of(PROMPT[: 2 * BLOCK_SIZE + 1]))
        await fetched(second, PROMPT)
        assert second.stored.counts()["hit"] == NUM_BLOCKS - 2
        # Nothing is missing, and nothing is asked for.
        await fetched(second, PROMPT)
        assert second.stored.counts()["hit"] == NUM_BLOCKS - 2


async def test_behind_a_broken_value_everything_is_computed(redis: RedisServer) -> None:
    async with worker(redis.url) as first, worker(redis.url) as second:
        await keep(first, PROMPT)
        hashes = first.engine.blocks.findable()
        client = Redis.from_url(redis.url)
        key = f"outrider:{{{MODEL}}}:payload:".encode() + hashes[2]
        value = bytearray(cast(bytes, await client.get(key)))
        value[-1] ^= 1
        await client.set(key, bytes(value))
        await client.aclose()
        sequence = await fetched(second, PROMPT)
        assert sequence.num_cached_tokens == 2 * BLOCK_SIZE
        assert second.stored.counts()["corrupt"] == 1


async def test_nothing_there_is_said(redis: RedisServer) -> None:
    async with worker(redis.url) as first:
        with pytest.raises(TransferFailed, match="none of its blocks"):
            await fetched(first, PROMPT)


async def test_without_room_it_is_computed_when_there_is(redis: RedisServer) -> None:
    async with worker(redis.url) as first, worker(redis.url, num_blocks=NUM_BLOCKS + 2) as second:
        await keep(first, PROMPT)
        # Who runs here has most of the pool, and goes on.
        other = sequence_of([9] * (4 * BLOCK_SIZE))
        other.num_steps = 0
        await second.loop.ask(lambda: second.engine.scheduler.add(other))
        kv_import = await second.loop.ask(lambda: second.engine.scheduler.begin_import(PROMPT, ROOT))
        blocks = await second.loop.ask(lambda: second.engine.blocks.allocate(4))
        with pytest.raises(TransferFailed, match="no room"):
            await second.stored.fetch(kv_import)

        def end() -> None:
            second.engine.blocks.release(blocks)
            second.engine.scheduler.imports.drop(kv_import)
            second.engine.scheduler.remove(other)

        await second.loop.ask(end)
        await second.until_idle()


async def test_a_fetch_that_is_given_up_leaves_nothing(redis: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    async with worker(redis.url) as first, worker(redis.url) as second:
        await keep(first, PROMPT)
        writing, go_on = threading.Event(), threading.Event()
        write = second.engine.pool.write_block

        def slow(block: int, payload: bytes) -> None:
            writing.set()
            go_on.wait()
            write(block, payload)

        monkeypatch.setattr(second.engine.pool, "write_block", slow)
        kv_import = await second.loop.ask(lambda: second.engine.scheduler.begin_import(PROMPT, ROOT))
        fetching = asyncio.create_task(second.stored.fetch(kv_import))
        await asyncio.to_thread(writing.wait)
        fetching.cancel()
        await second.loop.ask(lambda: second.engine.scheduler.imports.drop(kv_import))
        # Written to still: nobody else may have them.
        assert (await second.loop.ask(second.engine.blocks.counts)).owned == NUM_BLOCKS
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await fetching
        await second.until_idle()


async def test_no_more_than_a_share_of_the_pool_is_held(redis: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    async with worker(redis.url, num_blocks=64) as first:
        go_on = hold_copies(first, monkeypatch)
        await first.compute(sequence_of(PROMPT))
        await first.compute(sequence_of([5, *PROMPT]))
        assert (await first.loop.ask(first.engine.blocks.counts)).owned == 4, "a sixteenth of the pool"
        go_on.set()
        # The others have waited, and nothing is missing in between.
        await until(lambda: first.store.num_stored == 2 * NUM_BLOCKS, "stored")
        await first.until_idle()


async def test_what_the_pool_needs_before_its_turn_is_not_kept(
    redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with worker(redis.url, num_blocks=16) as first:
        go_on = hold_copies(first, monkeypatch)
        await first.compute(sequence_of(PROMPT))
        for number in range(4):
            await first.compute(sequence_of([number, *PROMPT]))
        go_on.set()
        await first.stored.drain()
        assert NUM_BLOCKS < first.store.num_stored < 5 * NUM_BLOCKS
        await first.until_idle()


async def test_those_that_want_the_same_fetch_it_once(redis: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    async with worker(redis.url) as first, worker(redis.url) as second:
        await keep(first, PROMPT)
        fetcher = Fetcher(second.loop, layout_of(second.engine.pool), {})
        offers = Offers(second.loop, 10.0)
        telemetry = configure("test", None)
        metrics = WorkerMetrics(telemetry.meter, "tiny")
        hand_over = HandOver(second.loop, offers, fetcher, second.stored, telemetry, metrics)
        fetch, asked = second.stored.fetch, []

        async def noting(kv_import: KVImport) -> Fetched:
            asked.append(kv_import)
            return await fetch(kv_import)

        monkeypatch.setattr(second.stored, "fetch", noting)
        stream: RouterStream[target_pb2.TargetResponse] = RouterStream()

        def begin() -> list[Sequence]:
            sequences = []
            for number in range(1, 6):
                hand_over.on_pull(stream, target_pb2.Pull(pull_id=number, token_ids=PROMPT, from_store=True))
                sequence = sequence_of(PROMPT)
                hand_over.on_begin(stream, number, sequence)
                second.engine.scheduler.add(sequence)
                hand_over.on_drop(stream, number)
                sequences.append(sequence)
            return sequences

        sequences = await second.loop.ask(begin)
        await until(lambda: all(each.finish is not None for each in sequences), "computed")
        assert second.stored.counts()["hit"] == NUM_BLOCKS
        assert len(asked) == 1, "those who find it here ask nobody"
        assert all(each.num_cached_tokens == NUM_BLOCKS * BLOCK_SIZE for each in sequences)
        await second.until_idle()
        await hand_over.close()


async def test_a_prefix_outlives_its_workers() -> None:
    # Long enough for any machine to fetch it sooner than it could compute it.
    [reference] = references(DEMO_TARGET, python_prompts(1000), 1, 24)
    async with running_stack(prefix_store=True, draft=None) as stack, inference(stack) as stub:
        for restarted in (False, True):
            if restarted:
                await until_stored(stack.redis, 1000 // 16)
                stack.kill("target-0")
            answer = await generate(stub, reference.prompt, max_tokens=24, temperature=0, ignore_eos=True)
            assert answer.token_ids == reference.token_ids
            assert answer.usage.cached_tokens == (992 if restarted else 0)
        await wait_until_idle(stack)
