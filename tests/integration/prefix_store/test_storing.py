"""The payload store against a real Redis: what is worth a copy, written once, whoever writes at the same time."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Sequence

import pytest

from shared.prefix import store as store_module
from shared.prefix.payload_index import PayloadIndex
from shared.prefix.store import PrefixStore
from shared.redis.server import RedisServer
from tests.support.payload_store import (
    BLOCK_BYTES,
    MODEL,
    PATIENT,
    PREFIX,
    accounted,
    chain,
    held_in_redis,
    payload_of,
    payloads_of,
    settled,
    store_at,
    stores,
    value_of,
)
from tests.support.redis_client import DEADLINE_SECONDS, client, eventually


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
