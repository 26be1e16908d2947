"""What we keep in Redis against one in cluster mode: one node that has some slots, and checks whose keys are whose."""

from __future__ import annotations

import asyncio
import hashlib
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.crc import key_slot

from shared.prefix.index import PrefixIndex
from shared.prefix.keys import prefix_link
from shared.prefix.publisher import PrefixPublisher
from shared.redis.link import RedisUnavailable
from shared.redis.server import find_redis_server
from shared.registry.directory import Directory
from shared.registry.listing import Listing
from shared.registry.member import Member


def is_free(port: int) -> bool:
    """A cluster's node listens on another port too, for its bus: its own + 10000."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[redis.Redis]:
    """A cluster of one node, without slots yet."""
    folder: Path = tmp_path_factory.mktemp("cluster")
    port = next(port for port in range(20_000, 55_535) if is_free(port) and is_free(port + 10_000))
    options = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--cluster-enabled", "yes"]
    options += ["--cluster-require-full-coverage", "no", "--dir", str(folder)]
    process = subprocess.Popen([find_redis_server(), *options], stdout=subprocess.DEVNULL)
    client = redis.Redis(port=port)
    try:
        deadline = time.monotonic() + 10
        while True:
            try:
                client.ping()
                break
            except redis.ConnectionError:
                assert time.monotonic() < deadline
                time.sleep(0.05)
        yield client
    finally:
        client.close()
        process.kill()
        process.wait()


def url(client: redis.Redis) -> str:
    return f"redis://127.0.0.1:{client.connection_pool.connection_kwargs['port']}"


def names(count: int) -> list[bytes]:
    """Block hashes; among them are some that hold braces."""
    hashes = [hashlib.sha256(bytes([index])).digest() for index in range(count - 1)]
    return [b"}{" * 16, *hashes]


async def test_all_keys_of_a_model_share_a_slot_and_a_cluster_takes_our_scripts(cluster: redis.Redis) -> None:
    command: Any = cluster.execute_command
    fingerprint = hashlib.sha256(b"model").hexdigest()
    slot = key_slot(fingerprint.encode())
    # Only the model's own slot is served: a script that touched another's would be refused.
    command("CLUSTER ADDSLOTS", slot)
    held = names(40)
    index = PrefixIndex(url(cluster), fingerprint, timeout_seconds=5.0)
    try:
        async with PrefixPublisher(url(cluster), fingerprint, "worker", lambda: held):
            found: dict[str, int] = {}
            for _ in range(400):
                found = await index.lookup(held, ["worker", "other"])
                if found == {"worker": 40}:
                    break
                await asyncio.sleep(0.02)
            assert found == {"worker": 40}
            # The blocks and the lease.
            assert command("CLUSTER COUNTKEYSINSLOT", slot) == 41 == cluster.dbsize()
    finally:
        await index.close()


async def test_all_keys_of_a_deployment_share_a_slot(cluster: redis.Redis) -> None:
    command: Any = cluster.execute_command
    slot = key_slot(b"blue")
    command("CLUSTER ADDSLOTS", slot)
    listing = Listing("target", "a", "127.0.0.1:50052", "both")
    directory = Directory(url(cluster), "blue")
    try:
        async with Member(url(cluster), "blue", listing):
            async with asyncio.timeout(10):
                while await directory.list() != [listing]:  # noqa: ASYNC110 - Redis does not tell when it changes
                    await asyncio.sleep(0.02)
            # The set and the listing.
            assert command("CLUSTER COUNTKEYSINSLOT", slot) == 2
        assert await directory.list() == []
    finally:
        await directory.close()


async def test_a_node_without_the_slot_is_no_index_and_no_failure(cluster: redis.Redis) -> None:
    index = PrefixIndex(url(cluster), "another model", timeout_seconds=5.0)
    try:
        assert await index.lookup(names(3), ["worker"]) == {}
    finally:
        await index.close()
    link = prefix_link(url(cluster), "another model", 5.0)
    with pytest.raises(RedisUnavailable):
        await link.run("return 1")
    await link.close()


def test_the_slot_is_the_fingerprints() -> None:
    link = prefix_link("redis://unused", "abc", 1.0)
    keys = [prefix.encode() + name for prefix in link.key_prefixes for name in (b"", *names(20))]
    assert {key_slot(key) for key in keys} == {key_slot(b"abc")}
