"""A Redis for all tests of the payload store of a file, empty for each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shared.prefix import store as store_module
from shared.redis.server import RedisServer
from tests.support.payload_store import BLOCK_BYTES, client


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


@pytest.fixture(autouse=True)
def nothing_is_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was written a moment ago may go for what comes now."""
    monkeypatch.setattr(store_module, "_FRESH_SECONDS", 0.0)


@pytest.fixture
def in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts take three blocks, answers and transactions two."""
    monkeypatch.setattr(store_module, "_BATCH_BLOCKS", 3)
    monkeypatch.setattr(store_module, "_READ_BYTES", 2 * BLOCK_BYTES)
    monkeypatch.setattr(store_module, "_WRITE_BYTES", 2 * BLOCK_BYTES)
