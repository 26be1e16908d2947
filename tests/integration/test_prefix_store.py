"""The payload store against a real Redis: what comes back, how much it takes, and how it survives losing Redis."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import signal
import threading
import time
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.crc import key_slot

from shared.prefix import payload_index
from shared.prefix import store as store_module
from shared.prefix.block_hash import hash_blocks, root_hash
from shared.prefix.payload import HEADER_BYTES, pack
from shared.prefix.payload_index import PayloadIndex
from shared.prefix.store import PrefixStore
from shared.redis.server import RedisServer

MODEL = "model-a"
ROOT = root_hash(MODEL, b"")
PREFIX = b"outrider:{model-a}:payload:"
ACCOUNT = b"outrider:{model-a}:payloads"
BLOCK_BYTES = 4096
MIB = 1 << 20
DEADLINE_SECONDS = 30.0
# A timeout that a busy test machine does not miss.
PATIENT = 20.0


@pytest.fixture(scope="module")
def shared_server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture
async def server(shared_server: RedisServer) -> RedisServer:
    """A running Redis with nothing in it."""
    shared_server.start()
    async with client(shared_server) as redis:
        await redis.flushall()
    return shared_server


@pytest.fixture(autouse=True)
def nothing_is_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was written a moment ago may go for what comes now."""
    monkeypatch.setattr(store_module, "_FRESH_SECONDS", 0.0)


@pytest.fixture
def in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts take three blocks, answers and transactions two."""
    monkeypatch.setattr(store_module, "_BATCH_BLOCKS", 3)
    monkeypatch.setattr(store_module, "_READ_BYTES", 2 * BLOCK_BYTES)
    monkeypatch.setattr(store_module, "_WRITE_BYTES", 2 * BLOCK_BYTES)


@contextlib.asynccontextmanager
async def client(server: RedisServer) -> AsyncIterator[Redis]:
    # With a socket timeout of its own the client can swallow the cancellation at a deadline.
    redis = Redis.from_url(server.url, socket_timeout=None)
    try:
        yield redis
    finally:
        await redis.aclose()


def store_at(
    url: str,
    fingerprint: str = MODEL,
    *,
    block_bytes: int = BLOCK_BYTES,
    max_bytes: int = 64 * MIB,
    ttl_seconds: float = 3600.0,
    max_pending_bytes: int = 16 * MIB,
) -> PrefixStore:
    return PrefixStore(
        url,
        fingerprint,
        block_bytes,
        max_bytes=max_bytes,
        ttl_seconds=ttl_seconds,
        max_pending_bytes=max_pending_bytes,
    )


@contextlib.asynccontextmanager
async def index_at(url: str, *, timeout_seconds: float = PATIENT) -> AsyncIterator[PayloadIndex]:
    index = PayloadIndex(url, MODEL, timeout_seconds=timeout_seconds)
    try:
        yield index
    finally:
        await index.close()


async def eventually(condition: Callable[[], Awaitable[bool]], what: str) -> None:
    """Waits until `condition` holds; fails at the deadline."""
    try:
        async with asyncio.timeout(DEADLINE_SECONDS):
            while not await condition():  # noqa: ASYNC110 - Redis does not tell when it changes
                await asyncio.sleep(0.01)
    except TimeoutError:
        pytest.fail(f"not within {DEADLINE_SECONDS:g} s: {what}")


def chain(num_blocks: int, start: int = 0) -> list[bytes]:
    return hash_blocks(range(start, start + 4 * num_blocks), 4, ROOT)


def payload_of(block: bytes, block_bytes: int = BLOCK_BYTES) -> bytes:
    return random.Random(block).randbytes(block_bytes)


def payloads_of(blocks: Iterable[bytes], block_bytes: int = BLOCK_BYTES) -> list[bytes]:
    return [payload_of(block, block_bytes) for block in blocks]


async def settled(store: PrefixStore, num_blocks: int) -> None:
    """Waits until `num_blocks` in all were written or dropped by `store`."""

    async def done() -> bool:
        return store.num_stored + store.num_dropped == num_blocks

    await eventually(done, f"{num_blocks} blocks are written or dropped")


async def stores(store: PrefixStore, blocks: Sequence[bytes], block_bytes: int = BLOCK_BYTES) -> None:
    """Puts blocks that Redis does not have, and waits until it does."""
    before = store.num_stored
    for block in blocks:
        assert store.wants(block)
        store.put(block, payload_of(block, block_bytes))
    await settled(store, before + len(blocks))
    assert store.num_dropped == 0


async def held_in_redis(redis: Redis) -> set[bytes]:
    return {key.removeprefix(PREFIX) async for key in redis.scan_iter(match=PREFIX + b"*", count=1000)}


async def accounted(redis: Redis) -> set[bytes]:
    members: list[Any] = await redis.zrange(ACCOUNT, 0, -1)
    return set(members)


async def value_of(redis: Redis, block: bytes) -> bytes:
    value = await redis.get(PREFIX + block)
    assert isinstance(value, bytes)
    return value


async def bytes_in_redis(redis: Redis) -> int:
    """What all keys take at one moment, as Redis itself counts it."""
    script = """
    local total = 0
    for _, key in ipairs(redis.call('KEYS', '*')) do
      total = total + redis.call('MEMORY', 'USAGE', key, 'SAMPLES', 0)
    end
    return total
    """
    return int(await redis.eval(script, 0))


async def next_millisecond(redis: Redis) -> None:
    """Uses before and after it differ in time, as the account sees it."""
    seconds, micros = await redis.time()

    async def over() -> bool:
        later_seconds, later_micros = await redis.time()
        return bool((later_seconds, later_micros // 1000) != (seconds, micros // 1000))

    await eventually(over, "time goes on")


def messages(caplog: pytest.LogCaptureFixture, beginning: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.getMessage().startswith(beginning)]


async def test_what_one_worker_stored_another_fetches(server: RedisServer) -> None:
    blocks = chain(40)
    async with (
        store_at(server.url) as writer,
        store_at(server.url) as reader,
        index_at(server.url) as index,
        client(server) as redis,
    ):
        assert await index.depth(blocks) == 0
        assert await reader.get(blocks, PATIENT) == []
        await stores(writer, blocks)
        assert await index.depth(blocks) == 40
        assert await reader.get(blocks, PATIENT) == payloads_of(blocks)
        assert await reader.get(blocks[:7], PATIENT) == payloads_of(blocks[:7])
        assert (reader.num_hits, reader.num_stored, reader.num_corrupt) == (47, 0, 0)
        assert (writer.num_hits, writer.num_stored, writer.num_dropped) == (0, 40, 0)
        assert await index.depth([]) == 0
        assert await reader.get([], PATIENT) == []
        assert await value_of(redis, blocks[0]) == pack(MODEL, blocks[0], payload_of(blocks[0]))
        keys: list[Any] = await redis.keys()
        assert sorted(keys) == sorted([ACCOUNT, *(PREFIX + block for block in blocks)])
        # One slot: a Redis Cluster takes our scripts and transactions.
        assert {key_slot(key) for key in keys} == {key_slot(MODEL.encode())}


async def test_two_models_do_not_mix(server: RedisServer) -> None:
    # The same hashes on purpose: the fingerprint in the keys must separate them by itself.
    blocks = chain(3)
    async with store_at(server.url) as ours, store_at(server.url, "model-b") as others:
        await stores(ours, blocks)
        assert await others.get(blocks, PATIENT) == []
        assert await others.depth(blocks) == 0


@pytest.mark.usefixtures("in_pieces")
async def test_a_run_ends_at_the_first_gap(server: RedisServer) -> None:
    blocks = chain(10)
    async with store_at(server.url) as store, client(server) as redis:
        await stores(store, blocks)
        assert await store.get(blocks, PATIENT) == payloads_of(blocks)
        for gap in (9, 8, 6, 5, 3, 2, 0):
            await redis.unlink(PREFIX + blocks[gap])
            assert await store.get(blocks, PATIENT) == payloads_of(blocks[:gap])
            assert await store.depth(blocks) == gap
            # Having missed it, we know that Redis lost it, and take it again.
            assert store.wants(blocks[gap])
            assert await accounted(redis) == await held_in_redis(redis)
        assert store.num_corrupt == 0


async def test_only_what_is_returned_is_fetched(server: RedisServer) -> None:
    blocks = chain(10)

    async def bytes_sent(redis: Redis) -> int:
        return int((await redis.info("stats"))["total_net_output_bytes"])

    async with store_at(server.url) as store, client(server) as redis:
        await stores(store, blocks)
        await redis.unlink(PREFIX + blocks[2])
        before = await bytes_sent(redis)
        assert await store.depth(blocks) == 2
        assert await store.get(blocks[2:], PATIENT) == []
        # What Redis says of itself takes a part of this.
        assert await bytes_sent(redis) - before < 4 * BLOCK_BYTES
        assert await store.get(blocks, PATIENT) == payloads_of(blocks[:2])
        assert await bytes_sent(redis) - before < 7 * BLOCK_BYTES


async def test_long_chains_are_asked_for_in_part(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(payload_index, "_MAX_DEPTH", 5)
    blocks = chain(8)
    async with store_at(server.url) as store, index_at(server.url) as index:
        await stores(store, blocks)
        assert await index.depth(blocks) == 5
        assert await index.depth(blocks[:4]) == 4


@pytest.mark.usefixtures("in_pieces")
async def test_corrupt_values_are_refused_deleted_and_counted(
    server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    blocks = chain(10)
    generator = random.Random(5)
    async with store_at(server.url) as store, client(server) as redis:
        await stores(store, blocks)
        for num_corrupt, at in enumerate((9, 7, 6, 4, 1, 0), start=1):
            value = bytearray(await value_of(redis, blocks[at]))
            value[generator.randrange(len(value))] ^= 1 << generator.randrange(8)
            await redis.set(PREFIX + blocks[at], bytes(value))
            assert await store.get(blocks, PATIENT) == payloads_of(blocks[:at])
            assert store.num_corrupt == num_corrupt
            assert not await redis.exists(PREFIX + blocks[at])
            assert await accounted(redis) == await held_in_redis(redis)
        assert len(messages(caplog, "stored block")) == 6
        # Gone is gone, and not corrupt once more.
        assert await store.get(blocks, PATIENT) == []
        assert store.num_corrupt == 6
        await stores(store, [blocks[at] for at in (9, 7, 6, 4, 1, 0)])
        assert await store.get(blocks, PATIENT) == payloads_of(blocks)


@pytest.mark.parametrize(
    "alien",
    [
        pack("model-b", chain(3)[1], payload_of(chain(3)[1])),
        pack(MODEL, chain(3)[0], payload_of(chain(3)[0])),
        pack(MODEL, chain(3)[1], payload_of(chain(3)[1])[:-1]),
        payload_of(chain(3)[1]),
        b"",
    ],
    ids=["another model", "another block", "another size", "no header", "nothing"],
)
async def test_values_that_are_not_ours_are_refused(server: RedisServer, alien: bytes) -> None:
    blocks = chain(3)
    async with store_at(server.url) as store, client(server) as redis:
        await stores(store, blocks)
        await redis.set(PREFIX + blocks[1], alien)
        assert await store.get(blocks, PATIENT) == payloads_of(blocks[:1])
        assert store.num_corrupt == 1
        assert not await redis.exists(PREFIX + blocks[1])


async def test_what_is_no_value_at_all_is_deleted_and_written_again(
    server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    blocks = chain(3)
    async with store_at(server.url) as store, client(server) as redis:
        await stores(store, blocks)
        await redis.delete(PREFIX + blocks[1])
        await redis.lpush(PREFIX + blocks[1], "odd")
        assert await store.get(blocks, PATIENT) == payloads_of(blocks[:1])
        assert store.num_corrupt == 1
        assert messages(caplog, f"stored block {blocks[1].hex()} is deleted: it is a list, not a string")
        assert not await redis.exists(PREFIX + blocks[1])
        await stores(store, blocks[1:2])
        assert await store.get(blocks, PATIENT) == payloads_of(blocks)


@pytest.mark.parametrize("block_bytes", [1000, 64 * 1024 - HEADER_BYTES, 64 * 1024])
async def test_all_workers_together_stay_under_the_limit(server: RedisServer, block_bytes: int) -> None:
    max_bytes = 40 * (block_bytes + 1024)
    blocks = chain(300)
    over = asyncio.Event()
    highest = 0

    async def watch(redis: Redis) -> None:
        nonlocal highest
        while not over.is_set():
            highest = max(highest, await bytes_in_redis(redis))

    async with contextlib.AsyncExitStack() as stack:
        redis = await stack.enter_async_context(client(server))
        workers = [
            await stack.enter_async_context(store_at(server.url, block_bytes=block_bytes, max_bytes=max_bytes))
            for _ in range(3)
        ]
        watching = asyncio.create_task(watch(redis))
        for begin in range(0, 300, 30):
            for index, worker in enumerate(workers):
                for block in blocks[begin + index : begin + 30 : 3]:
                    worker.put(block, payload_of(block, block_bytes))
            for worker in workers:
                await settled(worker, begin // 3 + 10)
        over.set()
        await watching
        assert [worker.num_stored for worker in workers] == [100, 100, 100]
        held = await held_in_redis(redis)
        assert held == await accounted(redis)
        # Not far below either, and the newest.
        assert max_bytes / 2 < highest <= max_bytes
        assert await bytes_in_redis(redis) > max_bytes / 2
        assert set(blocks[-30:]) <= held
        assert await workers[0].get(blocks[-30:], PATIENT) == payloads_of(blocks[-30:], block_bytes)


async def test_a_limit_of_less_than_a_batch_is_kept(server: RedisServer) -> None:
    blocks = chain(20)
    async with store_at(server.url, max_bytes=3 * 6144) as store, client(server) as redis:
        await stores(store, blocks)
        assert len(await held_in_redis(redis)) == 3
        assert await accounted(redis) == await held_in_redis(redis)


async def test_a_chain_beyond_the_limit_keeps_its_beginning(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "_FRESH_SECONDS", 60.0)
    blocks = chain(20)
    async with store_at(server.url, max_bytes=8 * 6144) as store, client(server) as redis:
        for begin in range(0, 20, 5):
            for block in blocks[begin : begin + 5]:
                store.put(block, payload_of(block))
            await eventually(lambda: is_written(store), "written")
        limit = 8 * 6144 // (4096 + 1024 + 512)
        assert await store.depth(blocks) == limit
        assert (store.num_stored, store.num_dropped) == (limit, 20 - limit)
        assert await accounted(redis) == await held_in_redis(redis)
        # Those long unused go.
        monkeypatch.setattr(store_module, "_FRESH_SECONDS", 0.0)
        async with store_at(server.url, max_bytes=8 * 6144) as later:
            await stores(later, blocks[limit:])
        assert len(await held_in_redis(redis)) == limit
        assert await accounted(redis) == await held_in_redis(redis)


async def is_written(store: PrefixStore) -> bool:
    return not store.num_pending


async def test_room_is_waited_for(server: RedisServer) -> None:
    blocks = chain(12)
    async with store_at(server.url, max_pending_bytes=2 * BLOCK_BYTES) as store:

        def offer() -> None:
            for block in blocks:
                assert store.wait_for_room(DEADLINE_SECONDS)
                store.put(block, payload_of(block))

        await asyncio.to_thread(offer)
        await eventually(lambda: is_written(store), "written")
        assert await store.depth(blocks) == 12
        assert store.num_dropped == 0
    assert not await asyncio.to_thread(store.wait_for_room, DEADLINE_SECONDS)


async def test_the_longest_unused_go_first(server: RedisServer) -> None:
    # Room for ten.
    blocks = chain(14)
    async with store_at(server.url, max_bytes=10 * 6144) as store, client(server) as redis:
        await stores(store, blocks[:5])
        await next_millisecond(redis)
        await stores(store, blocks[5:10])
        await next_millisecond(redis)
        assert await store.get(blocks[:3], PATIENT) == payloads_of(blocks[:3])
        await next_millisecond(redis)
        await stores(store, blocks[10:12])
        assert await held_in_redis(redis) == {*blocks[:3], *blocks[5:12]}
        await stores(store, blocks[12:14])
        assert {*blocks[:3], *blocks[10:14]} <= await held_in_redis(redis)
        assert len(await held_in_redis(redis)) == 10
        assert await accounted(redis) == await held_in_redis(redis)


async def test_a_lowered_limit_is_met_step_by_step(server: RedisServer) -> None:
    blocks = chain(140)
    async with store_at(server.url) as before, client(server) as redis:
        await stores(before, blocks[:100])
        async with store_at(server.url, max_bytes=10 * 6144) as after:
            for num_added, block in enumerate(blocks[100:], start=1):
                await stores(after, [block])
                held = await held_in_redis(redis)
                assert block in held
                # One script does no more than a few deletions for each block that it adds.
                assert len(held) == max(10, 100 - 3 * num_added)
                assert await accounted(redis) == held


async def test_what_expired_makes_room_before_anything_that_is_alive(server: RedisServer) -> None:
    # Room for ten, of which five expire unseen: the account still has them.
    blocks = chain(15)
    limit = 10 * 6144
    async with (
        store_at(server.url, max_bytes=limit) as lasting,
        store_at(server.url, max_bytes=limit, ttl_seconds=0.05) as passing,
        client(server) as redis,
    ):
        await stores(lasting, blocks[:5])
        await next_millisecond(redis)
        await stores(passing, blocks[5:10])

        async def expired() -> bool:
            return await held_in_redis(redis) == set(blocks[:5])

        await eventually(expired, "five are left")
        assert await accounted(redis) == set(blocks[:10])
        await stores(lasting, blocks[10:15])
        assert await held_in_redis(redis) == {*blocks[:5], *blocks[10:15]}
        assert await accounted(redis) == await held_in_redis(redis)


async def test_what_is_unused_for_its_ttl_goes_and_leaves_nothing(server: RedisServer) -> None:
    blocks = chain(5)
    async with store_at(server.url, ttl_seconds=0.2) as store, client(server) as redis:
        await stores(store, blocks)

        async def gone() -> bool:
            return await redis.dbsize() == 0

        await eventually(gone, "values and account are gone")
        assert all(store.wants(block) for block in blocks)
        assert await store.get(blocks, PATIENT) == []
        assert store.num_corrupt == 0


async def test_use_renews_the_ttl(server: RedisServer) -> None:
    blocks = chain(4)
    async with (
        store_at(server.url) as store,
        # A shorter TTL than the others' must not end the account before their blocks.
        store_at(server.url, ttl_seconds=100.0) as hasty,
        client(server) as redis,
    ):

        async def is_fresh(key: bytes) -> bool:
            return 3_500_000 < await redis.pttl(key) <= 3_600_000

        await stores(store, blocks)
        assert all([await is_fresh(PREFIX + block) for block in blocks])
        assert await is_fresh(ACCOUNT)
        for block in blocks:
            await redis.pexpire(PREFIX + block, 1_000_000)
        await store.depth(blocks)
        assert not await is_fresh(PREFIX + blocks[0])
        await store.get(blocks[:2], PATIENT)
        assert [await is_fresh(PREFIX + block) for block in blocks] == [True, True, False, False]
        await hasty.get(blocks[3:], PATIENT)
        assert await redis.pttl(PREFIX + blocks[3]) <= 100_000
        assert await is_fresh(ACCOUNT)


async def test_what_is_there_already_is_not_written_again(server: RedisServer) -> None:
    blocks = chain(4)
    async with store_at(server.url) as first, store_at(server.url) as second, client(server) as redis:
        await stores(first, blocks[:3])
        for block in blocks:
            await redis.pexpire(PREFIX + block, 1_000_000)
        await redis.append(PREFIX + blocks[1], b"mark")
        for block in blocks:
            second.put(block, payload_of(block))

        async def renewed() -> bool:
            return all([await redis.pttl(PREFIX + block) > 3_500_000 for block in blocks])

        await eventually(renewed, "three are renewed and the fourth is written")
        await settled(second, 1)
        assert (await value_of(redis, blocks[1])).endswith(b"mark")
        assert not any(second.wants(block) for block in blocks)


async def test_only_what_is_worth_a_copy_is_wanted(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "_MAX_KNOWN", 3)
    blocks = chain(8)
    store = store_at(server.url, max_pending_bytes=2 * BLOCK_BYTES)
    assert not store.wants(blocks[0])
    async with store:
        assert store.wants(blocks[0])
        # The loop has had no turn yet: both wait.
        store.put(blocks[0], payload_of(blocks[0]))
        assert not store.wants(blocks[0])
        assert store.wants(blocks[1])
        store.put(blocks[1], payload_of(blocks[1]))
        # It is wanted, but must wait for room.
        assert store.wants(blocks[2])
        assert not await asyncio.to_thread(store.wait_for_room, 0.0)
        store.put(blocks[2], payload_of(blocks[2]))
        store.put(blocks[1], payload_of(blocks[1]))
        assert store.num_dropped == 1
        await settled(store, 3)
        assert [store.wants(block) for block in blocks[:3]] == [False, False, True]
        # Of more than three it forgets the oldest.
        await settled(store, 3)
        store.put(blocks[2], payload_of(blocks[2]))
        await settled(store, 4)
        store.put(blocks[3], payload_of(blocks[3]))
        await settled(store, 5)
        assert [store.wants(block) for block in blocks[:5]] == [True, False, False, False, True]
        # What it fetched it need not store.
        async with store_at(server.url) as other:
            await stores(other, blocks[4:6])
        assert len(await store.get(blocks[4:6], PATIENT)) == 2
        assert not store.wants(blocks[4])
    assert not store.wants(blocks[7])
    # An engine thread that has not heard of it yet does no harm.
    store.put(blocks[7], payload_of(blocks[7]))
    assert store.num_dropped == 2


async def test_known_blocks_are_wanted_again_after_a_while(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "_KNOWN_SECONDS", 0.05)
    (block,) = chain(1)
    async with store_at(server.url) as store:
        await stores(store, [block])

        async def wanted() -> bool:
            return store.wants(block)

        await eventually(wanted, "it may have been removed by now")


async def test_flood_from_many_threads_is_dropped_and_counted(server: RedisServer) -> None:
    blocks = chain(6000)
    async with store_at(server.url, max_pending_bytes=50 * BLOCK_BYTES) as store:

        def flood(thread: int) -> None:
            for block in blocks[thread::4]:
                store.put(block, payload_of(block))

        await asyncio.gather(*(asyncio.to_thread(flood, thread) for thread in range(4)))
        await settled(store, 6000)
        assert store.num_stored >= 50
        assert store.num_dropped > 0
        stored = [block for block in blocks if await store.depth([block])]
        assert len(stored) == store.num_stored
        assert await store.get(stored, PATIENT) == payloads_of(stored)


async def test_concurrent_stores_keep_one_sound_account(server: RedisServer) -> None:
    blocks = chain(200)
    limit = 60 * 6144
    async with (
        store_at(server.url, max_bytes=limit) as first,
        store_at(server.url, max_bytes=limit) as second,
        client(server) as redis,
    ):
        over = threading.Event()

        def offer(store: PrefixStore, seed: int) -> None:
            generator = random.Random(seed)
            while not over.wait(0.0002):
                block = generator.choice(blocks)
                if store.wants(block):
                    store.put(block, payload_of(block))

        async def fetch(store: PrefixStore, seed: int) -> None:
            generator = random.Random(seed)
            while store.num_hits < 300 or store.num_stored < 300:
                begin = generator.randrange(200)
                found = await store.get(blocks[begin:], PATIENT)
                assert found == payloads_of(blocks[begin : begin + len(found)])

        pairs = list(enumerate((first, second)))
        offering = [asyncio.create_task(asyncio.to_thread(offer, store, seed)) for seed, store in pairs]
        try:
            async with asyncio.timeout(2 * DEADLINE_SECONDS):
                await asyncio.gather(*(fetch(store, seed) for seed, store in pairs))
        finally:
            over.set()
            await asyncio.gather(*offering)

        async def idle() -> bool:
            return not first._pending and not second._pending

        await eventually(idle, "all is written")
        assert await accounted(redis) == await held_in_redis(redis)
        assert len(await held_in_redis(redis)) == limit // (4096 + 1024 + 512)
        assert (first.num_corrupt, second.num_corrupt) == (0, 0)


async def test_a_block_that_two_workers_write_at_once_is_counted_once(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = chain(8)
    limit = 8 * (4096 + 1024 + 512)
    async with (
        store_at(server.url, max_bytes=limit) as first,
        store_at(server.url, max_bytes=limit) as second,
        client(server) as redis,
    ):
        await stores(first, blocks)

        async def asked_before(hashes: Sequence[bytes]) -> list[int]:
            return list(range(len(hashes)))

        monkeypatch.setattr(second, "_renew", asked_before)
        await stores(second, blocks[6:])
        assert await held_in_redis(redis) == await accounted(redis) == set(blocks)


async def test_killed_redis_loses_the_blocks_and_nothing_else(
    server: RedisServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "_PAUSE_SECONDS", 0.01)
    caplog.set_level(logging.INFO, logger="shared.prefix")
    blocks = chain(60)
    async with store_at(server.url, max_pending_bytes=8 * BLOCK_BYTES) as store:
        await stores(store, blocks[:5])
        assert await store.get(blocks, PATIENT) == payloads_of(blocks[:5])
        assert server.pid is not None
        os.kill(server.pid, signal.SIGKILL)
        server.stop()
        begin = time.monotonic()
        for block in blocks[5:]:
            assert await store.get(blocks, PATIENT) == []
            assert await store.depth(blocks) == 0
            store.put(block, payload_of(block))
        # A refused connection is known at once.
        assert time.monotonic() - begin < PATIENT / 2
        await settled(store, 60)
        assert store.num_stored == 5
        assert all(store.wants(block) for block in blocks)
        # On this thread: Redis dies with the thread that started it.
        server.start()
        store.put(blocks[0], payload_of(blocks[0]))

        async def back() -> bool:
            if store.wants(blocks[0]):
                store.put(blocks[0], payload_of(blocks[0]))
            return await store.get(blocks, PATIENT) == payloads_of(blocks[:1])

        await eventually(back, "what is put now is found again")
    assert len(messages(caplog, "Redis is unavailable")) == 2
    assert len(messages(caplog, "Redis is back")) == 2
    assert not any(server.url.split("@")[0].split(":")[-1] in record.getMessage() for record in caplog.records)


async def test_redis_that_is_away_is_tried_again_only_after_a_pause(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "_WRITE_BYTES", BLOCK_BYTES)
    monkeypatch.setattr(store_module, "_PAUSE_SECONDS", 600.0)
    blocks = chain(3)
    server.stop()
    async with store_at(server.url, max_pending_bytes=3 * BLOCK_BYTES) as store:
        for block in blocks:
            store.put(block, payload_of(block))
        await settled(store, 1)
        # Time enough for more failures of that kind.
        for _ in range(20):
            assert await store.get(blocks, PATIENT) == []
        assert store.num_dropped == 1
        assert [store.wants(block) for block in blocks] == [True, False, False]
    assert store.num_dropped == 3


@contextlib.asynccontextmanager
async def black_hole() -> AsyncIterator[str]:
    """URL of a server that takes every connection and never says a word."""
    over = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer):
            await over.wait()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as listener:
        yield f"redis://127.0.0.1:{listener.sockets[0].getsockname()[1]}/0"
        over.set()


async def test_silent_redis_costs_timeouts_and_bounded_memory(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "_WRITE_SECONDS", 0.02)
    monkeypatch.setattr(store_module, "_PAUSE_SECONDS", 0.0)
    block_bytes = 64 * 1024
    blocks = chain(3000)
    async with (
        black_hole() as url,
        store_at(url, block_bytes=block_bytes, max_pending_bytes=2 * MIB) as store,
    ):
        begin = time.monotonic()
        assert await store.get(blocks, 0.2) == []
        assert 0.1 < time.monotonic() - begin < PATIENT / 2

        def flood() -> float:
            begin = time.monotonic()
            for block in blocks:
                store.put(block, bytes([block[0]]) * block_bytes)
            return time.monotonic() - begin

        tracemalloc.start()
        try:
            # 188 MiB in all, over and over: far more than may be held.
            for num_rounds in range(1, 4):
                assert await asyncio.to_thread(flood) < PATIENT / 2

                async def given_up(num_dropped: int = 3000 * num_rounds) -> bool:
                    return store.num_dropped == num_dropped

                await eventually(given_up, "every block is dropped in the end")
            grown, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 8 * MIB
        assert grown < MIB
        assert store.num_stored == 0
    assert [message.partition(":")[2] for message in messages(caplog, "Redis is unavailable")] == [
        " no stored prefixes are found until it is back",
        " computed prefixes are not stored until it is back",
    ]


async def test_hanging_redis_costs_the_router_one_timeout_and_heals(
    server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="shared.prefix")
    blocks = chain(5)
    async with store_at(server.url) as store, index_at(server.url, timeout_seconds=0.05) as index:
        await stores(store, blocks)

        async def found() -> bool:
            return await index.depth(blocks) == 5

        await eventually(found, "all five")
        caplog.clear()
        assert server.pid is not None
        os.kill(server.pid, signal.SIGSTOP)
        try:
            begin = time.monotonic()
            for _ in range(1000):
                assert await index.depth(blocks) == 0
            assert time.monotonic() - begin < 1000 * 0.05 / 4
        finally:
            os.kill(server.pid, signal.SIGCONT)
        assert messages(caplog, "Redis") == [
            "Redis is unavailable (no answer within 0.05 s): no stored prefixes are found until it is back"
        ]
        await eventually(found, "all five again")
        assert messages(caplog, "Redis")[1:2] == ["Redis is back"]


async def test_late_answers_are_never_taken_for_others(server: RedisServer) -> None:
    blocks = chain(20)
    async with store_at(server.url) as store:
        await stores(store, blocks)
        assert server.pid is not None
        os.kill(server.pid, signal.SIGSTOP)
        try:
            for begin in range(20):
                assert await store.get(blocks[begin:], 0.002) == []
        finally:
            os.kill(server.pid, signal.SIGCONT)
        for begin in range(20):
            assert await store.get(blocks[begin:], PATIENT) == payloads_of(blocks[begin:])
            assert await store.depth(blocks[:begin]) == begin
        assert store.num_corrupt == 0


@pytest.mark.usefixtures("in_pieces")
async def test_what_came_before_the_timeout_is_not_thrown_away(
    server: RedisServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = chain(10)
    async with store_at(server.url) as store:
        await stores(store, blocks)
        pid = server.pid
        assert pid is not None
        unpack = store._unpack
        num_pieces = 0

        def stop_at_the_third(
            hashes: Sequence[bytes], values: Sequence[bytes | None]
        ) -> tuple[list[bytes], str | None]:
            nonlocal num_pieces
            num_pieces += 1
            if num_pieces == 3:
                os.kill(pid, signal.SIGSTOP)
            return unpack(hashes, values)

        monkeypatch.setattr(store, "_unpack", stop_at_the_third)
        try:
            # Pieces of two, one (the end of a script's three) and two.
            assert await store.get(blocks, 2.0) == payloads_of(blocks[:5])
        finally:
            os.kill(pid, signal.SIGCONT)
        assert store.num_hits == 5
        # It answered: that is no outage.
        assert messages(caplog, "Redis") == []


async def test_full_redis_refuses_writes_but_is_read(server: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    blocks = chain(10)
    async with store_at(server.url) as store, client(server) as redis:
        await stores(store, blocks[:5])
        await redis.config_set("maxmemory", "1")
        try:
            for block in blocks[5:]:
                store.put(block, payload_of(block))
            await settled(store, 10)
            assert store.num_dropped == 5
            # Nothing of a refused transaction stays: the account has no more than is there.
            assert await accounted(redis) == await held_in_redis(redis) == set(blocks[:5])
        finally:
            await redis.config_set("maxmemory", "0")
        assert await store.get(blocks, PATIENT) == payloads_of(blocks[:5])
    (message,) = messages(caplog, "Redis is unavailable")
    assert "maxmemory" in message
    # Of the commands, and the bytes in them, it says nothing.
    assert message.isprintable()
    assert not any(command in message for command in ("EVAL", "SET"))


async def test_close_ends_what_is_under_way(server: RedisServer) -> None:
    blocks = chain(5)
    store = store_at(server.url)
    store.start()
    await stores(store, blocks[:4])
    assert server.pid is not None
    os.kill(server.pid, signal.SIGSTOP)
    try:
        fetching = asyncio.create_task(store.get(blocks, 1.0))
        looking = asyncio.create_task(store.depth(blocks))
        store.put(blocks[4], payload_of(blocks[4]))
        await asyncio.sleep(0)
        async with asyncio.timeout(DEADLINE_SECONDS):
            await store.close()
            assert await fetching == []
            assert await looking == 0
    finally:
        os.kill(server.pid, signal.SIGCONT)
    assert (store.num_stored, store.num_dropped) == (4, 1)


def test_wrong_arguments_are_refused() -> None:
    url = "redis://127.0.0.1:1/0"
    with pytest.raises(ValueError, match="scheme"):
        PayloadIndex("http://127.0.0.1", MODEL)
    with pytest.raises(ValueError, match="block_bytes 0 is below 1"):
        store_at(url, block_bytes=0)
    with pytest.raises(ValueError, match="max_bytes 4096 is below the 5632 that one block takes"):
        store_at(url, max_bytes=4096)
    with pytest.raises(ValueError, match="ttl_seconds 0 is below"):
        store_at(url, ttl_seconds=0.0)
    with pytest.raises(ValueError, match="max_pending_bytes 4095 is below the 4096 of one block"):
        store_at(url, max_pending_bytes=4095)
    store = store_at(url)
    with pytest.raises(ValueError, match="5 bytes, not 32"):
        store.put(b"short", payload_of(b""))
    with pytest.raises(ValueError, match="payload has 3 bytes, not 4096"):
        store.put(chain(1)[0], b"abc")


async def test_wrong_hashes_are_refused() -> None:
    store = store_at("redis://127.0.0.1:1/0")
    for call in (store.depth([b"short"]), store.get([b"short"], 1.0)):
        with pytest.raises(ValueError, match="5 bytes, not 32"):
            await call
    await store.close()
