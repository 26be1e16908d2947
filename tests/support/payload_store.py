"""A payload store and a Redis for its tests: what is in it, and when it has settled."""

from __future__ import annotations

import contextlib
import random
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

import pytest
from redis.asyncio import Redis

from shared.prefix.block_hash import hash_blocks, root_hash
from shared.prefix.payload_index import PayloadIndex
from shared.prefix.store import PrefixStore
from tests.support.redis_client import eventually

MODEL = "model-a"
ROOT = root_hash(MODEL, b"")
PREFIX = b"outrider:{model-a}:payload:"
ACCOUNT = b"outrider:{model-a}:payloads"
BLOCK_BYTES = 4096
MIB = 1 << 20
# A timeout that a busy test machine does not miss.
PATIENT = 20.0


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
