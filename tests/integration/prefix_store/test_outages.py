"""The payload store when Redis dies, hangs, is late or full, or the store itself ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
import tracemalloc
from collections.abc import AsyncIterator, Sequence

import pytest

from shared.prefix import store as store_module
from shared.redis.server import RedisServer
from tests.support.payload_store import (
    BLOCK_BYTES,
    MIB,
    PATIENT,
    accounted,
    chain,
    held_in_redis,
    index_at,
    messages,
    payload_of,
    payloads_of,
    settled,
    store_at,
    stores,
)
from tests.support.redis_client import DEADLINE_SECONDS, client, eventually


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
