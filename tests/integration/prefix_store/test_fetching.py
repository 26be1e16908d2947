"""The payload store against a real Redis: what was stored comes back, whole and sound or not at all."""

from __future__ import annotations

import random
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.crc import key_slot

from shared.prefix import payload_index
from shared.prefix.payload import pack
from shared.redis.server import RedisServer
from tests.support.payload_store import (
    ACCOUNT,
    BLOCK_BYTES,
    MODEL,
    PATIENT,
    PREFIX,
    accounted,
    chain,
    held_in_redis,
    index_at,
    messages,
    payload_of,
    payloads_of,
    store_at,
    stores,
    value_of,
)
from tests.support.redis_client import client


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
