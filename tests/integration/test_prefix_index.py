"""The prefix index against a real Redis: what it finds of what is published."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
from collections.abc import Collection

import pytest

from shared.prefix.index import PrefixIndex
from shared.redis.server import RedisServer
from tests.support.prefix_index import LONG_LEASE, MODEL, chain, finds, held_in_redis, index_at, publisher_at
from tests.support.redis_client import client, eventually


async def test_depth_is_the_leading_run_each_instance_holds(server: RedisServer) -> None:
    generator = random.Random(7)
    blocks = chain(12)
    holdings: dict[str, set[bytes]] = {"a": set(), "b": set(), "c": set()}
    async with contextlib.AsyncExitStack() as stack:
        publishers = {
            instance: await stack.enter_async_context(publisher_at(server.url, instance, functools.partial(set, held)))
            for instance, held in holdings.items()
        }
        index = await stack.enter_async_context(index_at(server.url))
        for _ in range(25):
            for instance, held in holdings.items():
                wanted = {block for i, block in enumerate(blocks) if generator.random() > 0.03 * i}
                gained, lost = wanted - held, held - wanted
                held ^= gained | lost
                publishers[instance].stored(gained)
                publishers[instance].evicted(lost)
            expected = {}
            for instance, held in holdings.items():
                depth = 0
                while depth < len(blocks) and blocks[depth] in held:
                    depth += 1
                expected[instance] = depth
            await finds(index, blocks, expected)


async def test_instances_not_asked_for_and_prompts_without_blocks(server: RedisServer) -> None:
    blocks = chain(3)
    async with publisher_at(server.url, "a", lambda: blocks), index_at(server.url) as index:
        await finds(index, blocks, {"a": 3})
        assert await index.lookup(chain(3, start=1000), ["a"]) == {"a": 0}
        assert await index.lookup(blocks, ["b"]) == {}
        assert await index.lookup(blocks, []) == {}
        assert await index.lookup([], ["a"]) == {}
        with pytest.raises(ValueError, match="1 block hashes have 5 bytes, not 32 each"):
            await index.lookup([b"short"], ["a"])


async def test_without_its_lease_an_instance_never_matches(server: RedisServer) -> None:
    blocks = chain(4)
    async with (
        publisher_at(server.url, "a", lambda: blocks),
        publisher_at(server.url, "b", lambda: blocks[:2]),
        index_at(server.url) as index,
        client(server) as redis,
    ):
        await finds(index, blocks, {"a": 4, "b": 2})
        assert 0 < await redis.pttl("outrider:{model-a}:lease:a") <= LONG_LEASE * 1000
        assert await redis.pexpireat("outrider:{model-a}:lease:a", 1)
        assert await held_in_redis(redis, "a") == set(blocks)
        assert await index.lookup(blocks, ["a", "b", "c"]) == {"b": 2}


async def test_heartbeat_renews_the_lease_and_restores_a_lost_one(server: RedisServer) -> None:
    blocks = chain(4)
    lease = "outrider:{model-a}:lease:a"
    async with (
        publisher_at(server.url, "a", lambda: blocks, lease_seconds=1.0),
        index_at(server.url) as index,
        client(server) as redis,
    ):
        await finds(index, blocks, {"a": 4})
        # Nothing but a renewal can bring a lease this long down again.
        assert await redis.pexpire(lease, 1_000_000)

        async def renewed() -> bool:
            return int(await redis.pttl(lease)) <= 1000

        await eventually(renewed, "the heartbeat sets the lease's time anew")
        await redis.delete(lease)
        await finds(index, blocks, {"a": 4})


async def test_close_drops_the_lease_at_once(server: RedisServer) -> None:
    blocks = chain(4)
    async with index_at(server.url) as index:
        publisher = publisher_at(server.url, "a", lambda: blocks)
        publisher.start()
        await finds(index, blocks, {"a": 4})
        await publisher.close()
        assert await index.lookup(blocks, ["a"]) == {}
        # An engine thread that has not heard of it yet does no harm.
        publisher.stored(chain(2, start=500))


async def test_store_clears_what_dead_instances_left(server: RedisServer) -> None:
    blocks = chain(2)
    async with index_at(server.url) as index, client(server) as redis:
        for instance in ("dead-1", "dead-2"):
            async with publisher_at(server.url, instance, lambda: blocks):

                async def listed(instance: str = instance) -> bool:
                    return await held_in_redis(redis, instance) == set(blocks)

                await eventually(listed, f"{instance} is listed")
        async with publisher_at(server.url, "b", lambda: blocks), publisher_at(server.url, "a", lambda: blocks):
            await finds(index, blocks, {"a": 2, "b": 2})
            for block in blocks:
                assert await redis.hgetall(b"outrider:{model-a}:block:" + block) == {b"a": b"device", b"b": b"device"}


async def test_two_models_do_not_mix(server: RedisServer) -> None:
    # The same hashes on purpose: the fingerprint in the keys must separate them by itself.
    blocks = chain(4)
    async with (
        publisher_at(server.url, "a", lambda: blocks),
        publisher_at(server.url, "b", lambda: blocks[:1], fingerprint="model-b"),
        index_at(server.url) as index_a,
        index_at(server.url, "model-b") as index_b,
    ):
        await finds(index_a, blocks, {"a": 4})
        await finds(index_b, blocks, {"b": 1})


async def test_publishing_again_renews_the_blocks_ttl(server: RedisServer) -> None:
    (block,) = chain(1)
    key = b"outrider:{model-a}:block:" + block
    async with publisher_at(server.url, "a", lambda: [block]) as publisher, client(server) as redis:

        async def fresh() -> bool:
            return 3_500_000 < await redis.pttl(key) <= 3_600_000

        await eventually(fresh, "stored with its TTL")
        await redis.pexpire(key, 1_000_000)
        publisher.stored([block])
        await eventually(fresh, "the TTL is renewed")


async def test_blocks_held_for_long_are_published_again_before_their_ttl(server: RedisServer) -> None:
    blocks = chain(3)
    async with (
        publisher_at(server.url, "a", lambda: blocks, lease_seconds=1.0, block_ttl_seconds=1.0),
        index_at(server.url) as index,
        client(server) as redis,
    ):
        await finds(index, blocks, {"a": 3})
        # The lease stays, so only the refresh can bring it back.
        await redis.delete(b"outrider:{model-a}:block:" + blocks[1])
        await finds(index, blocks, {"a": 3})


async def test_overflow_ends_in_a_resync_that_leaves_no_drift(server: RedisServer) -> None:
    first = chain(2500)
    held = set(first)
    async with (
        publisher_at(server.url, "a", lambda: set(held), max_pending=50) as publisher,
        client(server) as redis,
    ):

        async def in_step() -> bool:
            return await held_in_redis(redis, "a") == held

        await eventually(in_step, "the snapshot, in several batches")
        # All in one go of the event loop: far more than the buffer holds, evictions among it.
        for block in first[:1200]:
            held.discard(block)
            publisher.evicted([block])
        for block in chain(300, start=100_000):
            held.add(block)
            publisher.stored([block])
        await eventually(in_step, "exactly what is held, nothing more")
        assert len(held) == 1600


@pytest.mark.parametrize("max_pending", [3, 65536])
async def test_changes_from_an_engine_thread_end_in_step(server: RedisServer, max_pending: int) -> None:
    blocks = chain(64)
    held: dict[bytes, None] = {}
    async with (
        publisher_at(server.url, "a", lambda: list(held), max_pending=max_pending) as publisher,
        client(server) as redis,
    ):

        def churn() -> None:
            generator = random.Random(3)
            for _ in range(20_000):
                block = generator.choice(blocks)
                if block in held:
                    del held[block]
                    publisher.evicted([block])
                else:
                    held[block] = None
                    publisher.stored([block])

        await asyncio.to_thread(churn)

        async def in_step() -> bool:
            return await held_in_redis(redis, "a") == set(held)

        await eventually(in_step, "exactly what is held")
        assert 0 < len(held) < 64


async def test_failing_snapshot_is_reported_and_the_lease_not_taken(
    server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    def snapshot() -> Collection[bytes]:
        raise RuntimeError("broken pool")

    async with publisher_at(server.url, "a", snapshot), index_at(server.url) as index:

        async def reported() -> bool:
            return any("prefix publishing stopped" in record.getMessage() for record in caplog.records)

        await eventually(reported, "the error is in the log")
        assert await index.lookup(chain(1), ["a"]) == {}


def test_wrong_settings_are_refused() -> None:
    url = "redis://127.0.0.1:1/0"
    with pytest.raises(ValueError, match="scheme"):
        PrefixIndex("http://127.0.0.1", MODEL)
    with pytest.raises(ValueError, match="lease_seconds 0 is below"):
        publisher_at(url, "a", list, lease_seconds=0.0)
    with pytest.raises(ValueError, match="block_ttl_seconds 5 is below lease_seconds 10"):
        publisher_at(url, "a", list, lease_seconds=10.0, block_ttl_seconds=5.0)
    with pytest.raises(ValueError, match="max_pending 0 is below 1"):
        publisher_at(url, "a", list, max_pending=0)
