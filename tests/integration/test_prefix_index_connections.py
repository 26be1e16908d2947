"""The prefix index's connections to a real Redis: round trips, handshakes, users and TLS."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from shared.redis.server import RedisServer
from tests.support.prefix_index import chain, finds, index_at, publisher_at
from tests.support.redis_client import client


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
