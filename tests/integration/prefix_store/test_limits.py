"""The payload store against a real Redis: how much it takes, and what goes first."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from redis.asyncio import Redis

from shared.prefix import store as store_module
from shared.prefix.payload import HEADER_BYTES
from shared.prefix.store import PrefixStore
from shared.redis.server import RedisServer
from tests.support.payload_store import (
    ACCOUNT,
    BLOCK_BYTES,
    PATIENT,
    PREFIX,
    accounted,
    bytes_in_redis,
    chain,
    held_in_redis,
    next_millisecond,
    payload_of,
    payloads_of,
    settled,
    store_at,
    stores,
)
from tests.support.redis_client import DEADLINE_SECONDS, client, eventually


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
