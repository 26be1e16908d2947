"""A Redis for all tests of a file, empty for each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shared.redis.server import RedisServer
from tests.support.redis_client import client


@pytest.fixture(scope="module")
def shared_server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture
async def server(shared_server: RedisServer) -> RedisServer:
    """A running Redis with nothing in it."""
    shared_server.start()
    async with client(shared_server) as redis:
        await redis.flushall()
    return shared_server
