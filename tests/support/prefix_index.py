"""Prefix indexes and those who publish to them, chains of blocks, and waiting for what is found of them."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Collection, Sequence

from redis.asyncio import Redis

from shared.prefix.block_hash import hash_blocks, root_hash
from shared.prefix.index import PrefixIndex
from shared.prefix.publisher import PrefixPublisher
from tests.support.redis_client import eventually

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
