"""A client of a test's own of a real Redis, and waiting for what is in it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from redis.asyncio import Redis

from shared.redis.server import RedisServer

DEADLINE_SECONDS = 30.0


@contextlib.asynccontextmanager
async def client(server: RedisServer) -> AsyncIterator[Redis]:
    # With a socket timeout of its own the client can swallow the cancellation at a deadline.
    redis = Redis.from_url(server.url, socket_timeout=None)
    try:
        yield redis
    finally:
        await redis.aclose()


async def eventually(condition: Callable[[], Awaitable[bool]], what: str) -> None:
    """Waits until `condition`, a question to Redis, holds; fails at the deadline."""
    try:
        async with asyncio.timeout(DEADLINE_SECONDS):
            while not await condition():  # noqa: ASYNC110 - Redis does not tell when it changes
                await asyncio.sleep(0.01)
    except TimeoutError:
        pytest.fail(f"not within {DEADLINE_SECONDS:g} s: {what}")
