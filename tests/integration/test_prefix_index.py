"""The prefix index against a real Redis: what it finds, and how it survives losing Redis."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import random
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Collection, Sequence

import pytest
from redis.asyncio import Redis

from shared.prefix.block_hash import hash_blocks, root_hash
from shared.prefix.index import PrefixIndex
from shared.prefix.publisher import PrefixPublisher
from shared.redis.server import RedisServer
from tests.support.redis_client import client, eventually

MODEL = "model-a"
ROOT = root_hash(MODEL, b"")
# A lookup timeout that a busy test machine does not miss.
PATIENT = 20.0
# A lease without a heartbeat in the time of a test.
LONG_LEASE = 600.0


@contextlib.asynccontextmanager
async def index_at(
    url: str, fingerprint: str = MODEL, *, timeout_seconds: float = PATIENT
) -> AsyncIterator[PrefixIndex]:
    index = PrefixIndex(url, fingerprint, timeout_seconds=timeout_seconds)
    try:
        yield index
    finally:
        await index.close()


def publisher_at(
    url: str,
    instance: str,
    snapshot: Callable[[], Collection[bytes]],
    *,
    fingerprint: str = MODEL,
    lease_seconds: float = LONG_LEASE,
    block_ttl_seconds: float = 3600.0,
    max_pending: int = 65536,
) -> PrefixPublisher:
    return PrefixPublisher(
        url,
        fingerprint,
        instance,
        snapshot,
        lease_seconds=lease_seconds,
        block_ttl_seconds=block_ttl_seconds,
        max_pending=max_pending,
    )


async def finds(index: PrefixIndex, hashes: Sequence[bytes], expected: dict[str, int]) -> None:
    """Waits until the index says `expected` of the instances "a", "b" and "c"."""
    seen: dict[str, int] = {}

    async def as_expected() -> bool:
        nonlocal seen
        seen = await index.lookup(hashes, ["a", "b", "c"])
        return seen == expected

    await eventually(as_expected, f"lookup gives {expected}")
    assert seen == expected


async def held_in_redis(redis: Redis, instance: str) -> set[bytes]:
    """The hashes that Redis lists under `instance`, read key by key."""
    held = set()
    async for key in redis.scan_iter(match="outrider:{" + MODEL + "}:block:*", count=1000):
        if await redis.hexists(key, instance):
            held.add(key[-32:])
    return held


def chain(num_blocks: int, start: int = 0) -> list[bytes]:
    return hash_blocks(range(start, start + 4 * num_blocks), 4, ROOT)


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


async def test_flushed_redis_heals(server: RedisServer) -> None:
    blocks = chain(4)
    async with (
        publisher_at(server.url, "a", lambda: blocks, lease_seconds=1.0),
        index_at(server.url) as index,
        client(server) as redis,
    ):
        await finds(index, blocks, {"a": 4})
        await redis.flushall()
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


@contextlib.asynccontextmanager
async def proxy_to(server: RedisServer, opened: asyncio.Event, traffic: list[str]) -> AsyncIterator[str]:
    """URL of a TCP proxy before `server` that keeps connections waiting until `opened`.

    It notes "connection" in `traffic` for each, and "request" or "answer" whenever bytes change direction.
    """
    port = int(server.url.rpartition(":")[2].split("/")[0])

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, direction: str) -> None:
        with contextlib.closing(writer):
            while data := await reader.read(1 << 20):
                if traffic[-1:] != [direction]:
                    traffic.append(direction)
                writer.write(data)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        traffic.append("connection")
        await opened.wait()
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(forward(reader, up_writer, "request"), forward(up_reader, writer, "answer"))

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as proxy:
        yield server.url.replace(str(port), str(proxy.sockets[0].getsockname()[1]))


async def test_one_round_trip_a_lookup(server: RedisServer) -> None:
    blocks = chain(200)
    opened = asyncio.Event()
    opened.set()
    traffic: list[str] = []
    async with (
        publisher_at(server.url, "a", lambda: blocks),
        publisher_at(server.url, "b", lambda: blocks[:150]),
        proxy_to(server, opened, traffic) as url,
        index_at(url) as index,
    ):
        await finds(index, blocks, {"a": 200, "b": 150})
        for _ in range(3):
            traffic.clear()
            assert await index.lookup(blocks, ["a", "b", "c"]) == {"a": 200, "b": 150}
            assert traffic == ["request", "answer"]


async def test_handshake_slower_than_the_timeout_still_ends_in_a_connection(server: RedisServer) -> None:
    blocks = chain(2)
    opened = asyncio.Event()
    traffic: list[str] = []
    async with (
        publisher_at(server.url, "a", lambda: blocks),
        proxy_to(server, opened, traffic) as url,
        index_at(url, timeout_seconds=0.02) as index,
    ):
        assert await index.lookup(blocks, ["a"]) == {}
        opened.set()
        await finds(index, blocks, {"a": 2})
        assert traffic.count("connection") == 1


async def test_restart_under_load_heals_and_lookups_stay_prompt(
    server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="shared.prefix")
    blocks = chain(400)
    held: dict[bytes, None] = dict.fromkeys(blocks[:100])
    over = threading.Event()
    down = threading.Event()
    changes_while_down = 0
    async with (
        publisher_at(server.url, "a", lambda: list(held), max_pending=64) as publisher,
        publisher_at(server.url, "b", lambda: blocks[:7], lease_seconds=1.0),
        index_at(server.url) as index,
        client(server) as redis,
    ):

        def churn() -> None:
            nonlocal changes_while_down
            generator = random.Random(11)
            while not over.wait(0.0005):
                block = generator.choice(blocks[100:])
                if held.pop(block, block) is None:
                    publisher.evicted([block])
                else:
                    held[block] = None
                    publisher.stored([block])
                changes_while_down += down.is_set()

        engine = asyncio.create_task(asyncio.to_thread(churn))
        try:
            await finds(index, blocks[:100], {"a": 100, "b": 7})
            await asyncio.to_thread(server.stop)
            down.set()
            slowest = 0.0
            num_lookups = 0
            while num_lookups < 100 or changes_while_down < 200:
                begin = time.monotonic()
                assert await index.lookup(blocks, ["a", "b"]) == {}
                slowest = max(slowest, time.monotonic() - begin)
                num_lookups += 1
            # Far below the lookup's own timeout: a refused connection is known at once.
            assert slowest < PATIENT / 4
            down.clear()
            # On this thread: Redis dies with the thread that started it.
            server.start()
            await finds(index, blocks[:100], {"a": 100, "b": 7})
        finally:
            over.set()
            await engine

        async def in_step() -> bool:
            return await held_in_redis(redis, "a") == set(held)

        await eventually(in_step, "exactly what is held")
    lost = [record for record in caplog.records if "lookups find nothing" in record.getMessage()]
    assert len(lost) == 1
    assert [r.getMessage() for r in caplog.records if r.name == "shared.prefix.index"][-1] == "Redis is back"


async def test_hanging_redis_costs_one_timeout_and_heals(server: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    blocks = chain(5)
    async with (
        publisher_at(server.url, "a", lambda: blocks),
        index_at(server.url) as ready,
        index_at(server.url, timeout_seconds=0.05) as index,
    ):
        await finds(ready, blocks, {"a": 5})
        assert server.pid is not None
        os.kill(server.pid, signal.SIGSTOP)
        try:
            begin = time.monotonic()
            for _ in range(1000):
                assert await index.lookup(blocks, ["a"]) == {}
            assert time.monotonic() - begin < 1000 * 0.05 / 4
        finally:
            os.kill(server.pid, signal.SIGCONT)
        assert [r.getMessage() for r in caplog.records if r.name == "shared.prefix.index"] == [
            "Redis is unavailable (no answer within 0.05 s): prefix lookups find nothing until it is back"
        ]
        await finds(index, blocks, {"a": 5})


async def test_cancelled_lookup_leaves_no_answer_behind_for_the_next(server: RedisServer) -> None:
    blocks = chain(5)
    async with publisher_at(server.url, "a", lambda: blocks[:3]), index_at(server.url) as index:
        await finds(index, blocks, {"a": 3})
        assert server.pid is not None
        os.kill(server.pid, signal.SIGSTOP)
        try:
            for _ in range(20):
                asked = asyncio.create_task(index.lookup(blocks, ["a"]))
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(asked, 0.002)
        finally:
            os.kill(server.pid, signal.SIGCONT)
        for _ in range(20):
            assert await index.lookup(blocks[:1], ["a"]) == {"a": 1}


async def test_redis_that_never_was_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    server = RedisServer()
    async with publisher_at(server.url, "a", lambda: chain(2)), index_at(server.url) as index:
        for _ in range(50):
            assert await index.lookup(chain(2), ["a"]) == {}
        messages = [record.getMessage() for record in caplog.records]
    assert len([message for message in messages if "lookups find nothing" in message]) == 1
    assert len([message for message in messages if "published again" in message]) == 1
    assert not any(server.url.split("@")[0].split(":")[-1] in message for message in messages)


async def test_user_and_password_of_the_url_are_used(server: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    blocks = chain(2)
    address = server.url.partition("@")[2]
    async with client(server) as redis:
        await redis.acl_setuser(
            "rider", enabled=True, passwords=["+sëcret"], keys=["outrider:*"], categories=["+@all", "-@dangerous"]
        )
    good = f"redis://rider:s%C3%ABcret@{address}"
    async with publisher_at(good, "a", lambda: blocks), index_at(good) as index:
        await finds(index, blocks, {"a": 2})
    async with index_at(f"redis://rider:wrong@{address}") as index:
        assert await index.lookup(blocks, ["a"]) == {}
    assert "invalid username-password pair" in caplog.records[-1].getMessage()


async def test_rediss_speaks_tls() -> None:
    first_bytes: asyncio.Queue[bytes] = asyncio.Queue()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer):
            await first_bytes.put(await reader.read(1024))

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as listener:
        port = listener.sockets[0].getsockname()[1]
        async with index_at(f"rediss://:secret@127.0.0.1:{port}/0") as index:
            assert await index.lookup(chain(1), ["a"]) == {}
        hello = await first_bytes.get()
    # A TLS record of type handshake.
    assert hello[:2] == b"\x16\x03"
    assert b"secret" not in hello


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
