"""The stack's child processes: ready, killed, restarted, drained, refused.

The child is a stub with a health service.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys

import pytest

from services.cli.process import ServiceProcess
from shared.settings import StartupError

SERVING = """
import signal, sys
from concurrent.futures import ThreadPoolExecutor
import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
server = grpc.server(ThreadPoolExecutor(2))
servicer = health.HealthServicer()
health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
server.add_insecure_port(sys.argv[1])
servicer.set("", health_pb2.HealthCheckResponse.SERVING)
signal.signal(signal.SIGTERM, lambda *_: (print("drained", flush=True), sys.exit(0)))
print('{"message": "serving"}', flush=True)
server.start()
while True:
    signal.pause()
"""

REFUSING = "import sys; print('outrider: no such model', file=sys.stderr); sys.exit(78)"
CRASHING = "import sys; print('some trouble', file=sys.stderr); sys.exit(3)"
SILENT = "import signal; signal.pause()"


class Child:
    """A ServiceProcess that runs `code`, and what it wrote."""

    def __init__(self, code: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            address = f"127.0.0.1:{probe.getsockname()[1]}"
        self.lines: list[tuple[str, str]] = []
        self.spoke = asyncio.Event()
        command = [sys.executable, "-c", code, address]
        self.process = ServiceProcess("stub", command, os.environ, address, self._log)

    def _log(self, name: str, line: str) -> None:
        self.lines.append((name, line))
        self.spoke.set()


async def test_a_killed_process_is_reported_and_started_again_and_a_stopped_one_drains() -> None:
    child = Child(SERVING)
    supervised = asyncio.create_task(child.process.supervise(60))
    await child.process.ready.wait()
    assert ("stub", '{"message": "serving"}') in child.lines
    child.process.kill()
    assert not child.process.ready.is_set()
    await child.process.ready.wait()
    assert child.process.restarts == 1
    assert ("stack", "stub was killed by SIGKILL; starting it again in 0.5 s") in child.lines
    await child.process.stop(60)
    await supervised
    assert child.lines[-1] == ("stub", "drained")
    assert not child.process.ready.is_set()


@pytest.mark.parametrize(
    ("code", "start_seconds", "message"),
    [
        (REFUSING, 60, "stub: no such model"),
        (CRASHING, 60, "stub ended with status 3: some trouble"),
        (SILENT, 0.2, "stub was killed by SIGKILL: not ready within 0.2 s"),
    ],
)
async def test_a_process_that_does_not_start_is_not_started_again(
    code: str, start_seconds: float, message: str
) -> None:
    child = Child(code)
    with pytest.raises(StartupError) as raised:
        await child.process.supervise(start_seconds)
    assert str(raised.value) == message


async def test_a_process_that_does_not_drain_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.cli.process.KILL_GRACE_SECONDS", 0.0)
    child = Child("import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True)\n" + SILENT)
    supervised = asyncio.create_task(child.process.supervise(60))
    await child.spoke.wait()
    assert child.lines == [("stub", "deaf")]
    await child.process.stop(0.1)
    await supervised
    assert child.lines[-1] == ("stack", "stub has not drained in 0.1 s: killed")
