"""The registry of workers against a real Redis: who is listed, and how it survives losing Redis."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

import pytest

from shared.redis.server import RedisServer
from shared.registry import directory as directory_module
from shared.registry.directory import Directory
from shared.registry.listing import Listing
from shared.registry.member import Member
from tests.support.redis_client import client, eventually

WORKERS = "outrider:{default}:workers"
# A lease without a beat in the time of a test.
LONG_LEASE = 600.0

TARGET = Listing("target", "t-1", "127.0.0.1:50052", "both")
DRAFT = Listing("draft", "d-1", "127.0.0.1:50051", "")

# A worker of a process of its own: argv is the Redis URL and the lease.
WORKER = """
import asyncio, sys
from shared.registry.listing import Listing
from shared.registry.member import Member

async def main():
    async with Member(sys.argv[1], "default", Listing("target", "t-1", "127.0.0.1:50052", "both"), float(sys.argv[2])):
        await asyncio.Event().wait()

asyncio.run(main())
"""


@contextlib.asynccontextmanager
async def directory_at(url: str, deployment: str = "default") -> AsyncIterator[Directory]:
    directory = Directory(url, deployment)
    try:
        yield directory
    finally:
        await directory.close()


def member_at(
    server: RedisServer, listing: Listing, *, deployment: str = "default", lease_seconds: float = LONG_LEASE
) -> Member:
    return Member(server.url, deployment, listing, lease_seconds)


async def lists(directory: Directory, *expected: Listing) -> None:
    """Waits until exactly these are listed, in this order."""

    async def as_expected() -> bool:
        return await directory.list() == list(expected)

    await eventually(as_expected, f"listed: {expected}")


def messages(caplog: pytest.LogCaptureFixture, name: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == f"shared.registry.{name}"]


async def test_workers_are_listed_by_kind_and_address(server: RedisServer) -> None:
    second = Listing("target", "a", "127.0.0.1:50053", "prefill")
    # Two processes that say the same address: one has died, or one of them is wrong.
    twin = replace(TARGET, instance_id="t-0")
    async with directory_at(server.url) as directory:
        assert await directory.list() == []
        async with contextlib.AsyncExitStack() as stack:
            for listing in (second, TARGET, DRAFT, twin):
                await stack.enter_async_context(member_at(server, listing))
            await lists(directory, DRAFT, twin, TARGET, second)
        assert await directory.list() == []


async def test_deployments_do_not_mix(server: RedisServer) -> None:
    other = replace(TARGET, address="127.0.0.1:50099")
    async with (
        directory_at(server.url, "blue") as blue,
        directory_at(server.url, "blue.2") as blue_2,
        directory_at(server.url) as default,
        member_at(server, TARGET, deployment="blue"),
    ):
        # The same instance id on purpose: the name in the keys must separate them by itself.
        async with member_at(server, other, deployment="blue.2"):
            await lists(blue, TARGET)
            await lists(blue_2, other)
            assert await default.list() == []
        assert await blue_2.list() == []
        assert await blue.list() == [TARGET]


async def test_close_unlists_at_once_and_leaves_nothing(server: RedisServer) -> None:
    async with directory_at(server.url) as directory, client(server) as redis:
        member = member_at(server, TARGET)
        member.start()
        await lists(directory, TARGET)
        await member.close()
        assert await redis.keys() == []
        assert await directory.list() == []


async def test_withdrawn_for_good_while_the_process_goes_on(server: RedisServer) -> None:
    async with (
        directory_at(server.url) as directory,
        client(server) as redis,
        member_at(server, TARGET, lease_seconds=0.06) as member,
    ):
        await lists(directory, TARGET)
        await asyncio.gather(member.withdraw(), member.withdraw())
        assert await redis.keys() == []
        # Another of the same name is none of its business any more.
        async with member_at(server, TARGET):
            await lists(directory, TARGET)
            await member.withdraw()
            assert await directory.list() == [TARGET]
        # Nothing is left that could list it again.
        assert not [task for task in asyncio.all_tasks() if task.get_name() == "registry-member"]
        assert await redis.keys() == []


async def test_new_address_replaces_the_old_one(server: RedisServer) -> None:
    moved = replace(TARGET, address="127.0.0.1:50077")
    async with directory_at(server.url) as directory:
        async with member_at(server, TARGET):
            await lists(directory, TARGET)
            async with member_at(server, moved):
                await lists(directory, moved)
        # And a process that comes back elsewhere, as a new one.
        reborn = Listing("target", "t-2", "127.0.0.1:50078", "both")
        async with member_at(server, reborn):
            await lists(directory, reborn)


async def test_beat_renews_the_lease_and_puts_back_what_is_lost(server: RedisServer) -> None:
    key = "outrider:{default}:worker:t-1"
    async with (
        member_at(server, TARGET, lease_seconds=1.0),
        directory_at(server.url) as directory,
        client(server) as redis,
    ):
        await lists(directory, TARGET)
        # Nothing but a beat can bring a lease this long down again.
        assert await redis.pexpire(key, 1_000_000)

        async def renewed() -> bool:
            return 0 < int(await redis.pttl(key)) <= 1000

        await eventually(renewed, "a beat sets the lease's time anew")
        for damage in (redis.flushall, lambda: redis.delete(WORKERS), lambda: redis.set(key, b"damaged")):
            await damage()
            await lists(directory, TARGET)


@contextlib.contextmanager
def worker_process(server: RedisServer, lease_seconds: float) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-c", WORKER, server.url, str(lease_seconds)]
    with subprocess.Popen(command, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}) as process:
        try:
            yield process
        finally:
            process.kill()


async def test_lease_of_a_silent_process_ends_and_is_taken_anew(server: RedisServer) -> None:
    async with directory_at(server.url) as directory, client(server) as redis:
        with worker_process(server, 1.0) as process:
            await lists(directory, TARGET)
            process.send_signal(signal.SIGSTOP)
            await lists(directory)
            assert await redis.keys() == []
            process.send_signal(signal.SIGCONT)
            await lists(directory, TARGET)
        # Killed, without a word.
        await lists(directory)


async def test_members_come_back_by_themselves_after_a_restart_of_redis(
    server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="shared.registry")
    async with (
        member_at(server, TARGET, lease_seconds=0.5),
        member_at(server, DRAFT, lease_seconds=0.5),
        directory_at(server.url) as directory,
    ):
        await lists(directory, DRAFT, TARGET)
        assert server.pid is not None
        os.kill(server.pid, signal.SIGKILL)
        server.stop()
        for _ in range(20):
            assert await directory.list() is None

        async def both_noticed() -> bool:
            return len(messages(caplog, "member")) == 2

        await eventually(both_noticed, "a line of each member")
        # On this thread: Redis dies with the thread that started it.
        server.start()
        await lists(directory, DRAFT, TARGET)
    for name, num_users, meaning in (
        ("directory", 1, "workers known so far are all there are until it is back"),
        ("member", 2, "this worker is listed again when it is back"),
    ):
        said = messages(caplog, name)
        assert [line.endswith(meaning) for line in said] == [True] * num_users + [False] * num_users
        assert said[num_users:] == ["Redis is back"] * num_users


async def test_members_may_start_before_redis_does(server: RedisServer) -> None:
    server.stop()
    async with member_at(server, TARGET), directory_at(server.url) as directory:
        assert await directory.list() is None
        server.start()
        await lists(directory, TARGET)


async def test_hanging_redis_holds_nobody_up(server: RedisServer) -> None:
    async with directory_at(server.url) as directory:
        member = member_at(server, TARGET, lease_seconds=0.06)
        member.start()
        await lists(directory, TARGET)
        assert server.pid is not None
        os.kill(server.pid, signal.SIGSTOP)
        try:
            begin = time.monotonic()
            answer, _ = await asyncio.gather(directory.list(), member.close())
            assert answer is None
            # 2 s for the beat under way, 2 s for the removal.
            assert time.monotonic() - begin < 8.0
        finally:
            os.kill(server.pid, signal.SIGCONT)
        # What was sent in vain may still be done then, but it does not last.
        await lists(directory)


class Proxy:
    """A TCP proxy before a Redis: it notes what passes, and can keep the bytes of its first client back."""

    def __init__(self, server: RedisServer) -> None:
        self.passing = asyncio.Event()
        self.passing.set()
        self.keeping = asyncio.Event()
        # "request" or "answer", whenever bytes change direction.
        self.traffic: list[str] = []
        self.num_bytes = 0
        self._num_clients = 0
        self._server_url = server.url
        self._port = int(server.url.rpartition(":")[2].split("/")[0])

    @contextlib.asynccontextmanager
    async def url(self) -> AsyncIterator[str]:
        async with await asyncio.start_server(self._serve, "127.0.0.1", 0) as proxy:
            yield self._server_url.replace(str(self._port), str(proxy.sockets[0].getsockname()[1]))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        first = self._num_clients == 0
        self._num_clients += 1
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._port)

        async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, direction: str) -> None:
            with contextlib.closing(writer):
                while data := await reader.read(1 << 20):
                    if self.traffic[-1:] != [direction]:
                        self.traffic.append(direction)
                    self.num_bytes += len(data)
                    if first and not self.passing.is_set():
                        self.keeping.set()
                        await self.passing.wait()
                    writer.write(data)

        await asyncio.gather(forward(reader, up_writer, "request"), forward(up_reader, writer, "answer"))


async def test_one_round_trip_a_reading(server: RedisServer) -> None:
    proxy = Proxy(server)
    async with (
        member_at(server, TARGET),
        member_at(server, DRAFT),
        proxy.url() as url,
        directory_at(url) as directory,
    ):
        await lists(directory, DRAFT, TARGET)
        for _ in range(3):
            proxy.traffic.clear()
            assert await directory.list() == [DRAFT, TARGET]
            assert proxy.traffic == ["request", "answer"]


async def test_beat_under_way_does_not_outlive_the_withdrawal(server: RedisServer) -> None:
    proxy = Proxy(server)
    async with (
        proxy.url() as url,
        directory_at(server.url) as directory,
        Member(url, "default", TARGET, 0.3) as member,
    ):
        await lists(directory, TARGET)
        proxy.passing.clear()
        await proxy.keeping.wait()
        withdrawal = asyncio.create_task(member.withdraw())
        # Long enough for a removal that does not wait for the beat.
        await asyncio.wait({withdrawal}, timeout=0.5)
        proxy.passing.set()
        await withdrawal
        for _ in range(20):
            assert await directory.list() == []
            await asyncio.sleep(0.01)


async def test_thousands_of_dead_are_cleared_away_by_readers_and_by_members(server: RedisServer) -> None:
    async with directory_at(server.url) as directory, client(server) as redis:

        async def only_the_living() -> bool:
            return await redis.zrange(WORKERS, 0, -1) == [b"t-1"]

        dead = {f"dead-{i}": float(i) for i in range(20_000)}
        async with member_at(server, TARGET):
            await lists(directory, TARGET)
            await redis.zadd(WORKERS, dead)
            assert await directory.list() == [TARGET]
            assert await only_the_living()
        async with member_at(server, TARGET, lease_seconds=1.0):
            await lists(directory, TARGET)
            await redis.zadd(WORKERS, dead)
            await eventually(only_the_living, "a beat clears the dead away")
        assert await redis.keys() == []


async def test_thousands_of_the_living_are_listed(server: RedisServer) -> None:
    async with directory_at(server.url) as directory, client(server) as redis:
        listings = [Listing("target", f"t-{i}", f"10.0.{i // 250}.{i % 250}:50052", "both") for i in range(9000)]
        await redis.mset({f"outrider:{{default}}:worker:{each.instance_id}": each.encode() for each in listings})
        await redis.zadd(WORKERS, {each.instance_id: "+inf" for each in listings})
        found = await directory.list()
    assert found is not None
    assert set(found) == set(listings)
    assert len(found) == len(listings)


async def test_what_is_no_listing_is_ignored_and_said_once(
    server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    prefix = "outrider:{default}:worker:"
    hostile: dict[str, Any] = {
        "garbage": b"\xff\x00",
        "empty": b"",
        "deep": b"[" * 4000,
        "pickle": b"cos\nsystem\n(S'exit'\ntR.",
        "router": TARGET.encode().replace(b"target", b"router"),
        "alias": TARGET.encode(),
        "\nforged line\x1b[2J" + "x" * 10_000: b"{}",
    }
    async with directory_at(server.url) as directory, client(server) as redis:
        for name, data in hostile.items():
            await redis.set(prefix + name, data)
        await redis.rpush(prefix + "list", b"not a text")
        await redis.zadd(WORKERS, dict.fromkeys([*hostile, "list", "evicted"], "+inf"))
        async with member_at(server, TARGET):
            await lists(directory, TARGET)
            (line,) = messages(caplog, "directory")
            assert line.startswith(f"{len(hostile)} listings ignored, first that of ")
            assert line.isprintable()
            assert len(line) < 300
            for _ in range(3):
                assert await directory.list() == [TARGET]
            await redis.set(prefix + "late", b"{}")
            await redis.zadd(WORKERS, {"late": "+inf"})
            for _ in range(3):
                assert await directory.list() == [TARGET]
    assert messages(caplog, "directory")[1:] == [
        "1 listings ignored, first that of b'late': not an object of kind, instance_id, address, role"
    ]


async def test_of_too_many_those_whose_lease_ends_first_are_followed(
    server: RedisServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory_module, "_MAX_LISTINGS", 3)
    prefix = "outrider:{default}:worker:"
    others = [replace(TARGET, instance_id=f"x-{number}") for number in range(3)]
    async with directory_at(server.url) as directory, client(server) as redis:
        for other in others:
            await redis.set(prefix + other.instance_id, other.encode())
        await redis.zadd(WORKERS, {other.instance_id: "+inf" for other in others})
        async with member_at(server, TARGET):
            await lists(directory, TARGET, *others[:2])
            assert await directory.list() == [TARGET, *others[:2]]
        await lists(directory, *others)
    assert messages(caplog, "directory") == ["4 workers are listed: no more than 3 are followed"]


async def test_of_what_is_too_long_only_the_beginning_is_read(
    server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    prefix = "outrider:{default}:worker:"
    other = replace(TARGET, instance_id="t-2")
    proxy = Proxy(server)
    async with proxy.url() as url, directory_at(url) as directory, client(server) as redis:
        await redis.set(prefix + "t-1", TARGET.encode().ljust(4096))
        await redis.set(prefix + "t-2", other.encode().ljust(4097))
        await redis.set(prefix + "huge", b"x" * 5_000_000)
        await redis.zadd(WORKERS, dict.fromkeys(["t-1", "t-2", "huge"], "+inf"))
        await lists(directory, TARGET)
    (line,) = messages(caplog, "directory")
    assert line.startswith("2 listings ignored, first that of b'huge': more than 4096 bytes")
    assert 3 * 4096 < proxy.num_bytes < 20_000


async def test_set_that_is_none_is_no_crash(server: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    async with client(server) as redis, directory_at(server.url) as directory:
        await redis.set(WORKERS, "a text")
        async with member_at(server, TARGET):
            assert await directory.list() is None
            assert "WRONGTYPE" in messages(caplog, "directory")[0]
            await redis.delete(WORKERS)
            await lists(directory, TARGET)


async def test_answers_are_bytes_whatever_the_url_asks_for(server: RedisServer) -> None:
    async with member_at(server, TARGET), directory_at(f"{server.url}?decode_responses=True") as directory:
        await lists(directory, TARGET)


def test_wrong_settings_are_refused() -> None:
    url = "redis://127.0.0.1:1/0"
    with pytest.raises(ValueError, match="scheme"):
        Directory("http://127.0.0.1")
    with pytest.raises(ValueError, match="scheme"):
        Member("http://127.0.0.1", "default", TARGET)
    with pytest.raises(ValueError, match="lease_seconds 0 is below"):
        Member(url, "default", TARGET, 0.0)
    for name in ("", "Blue", "blue green", "{blue}", "blau\n", "bläu", "b" * 65):
        with pytest.raises(ValueError, match=r"deployment '.*' is not 1 to 64 of"):
            Member(url, name, TARGET)
        with pytest.raises(ValueError, match=r"deployment '.*' is not 1 to 64 of"):
            Directory(url, name)
    Directory(url, "b" * 64)
