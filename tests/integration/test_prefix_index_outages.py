"""The prefix index when Redis is flushed, restarted, hangs or never was."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import signal
import threading
import time

import pytest

from shared.redis.server import RedisServer
from tests.support.prefix_index import PATIENT, chain, finds, held_in_redis, index_at, publisher_at
from tests.support.redis_client import client, eventually


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
