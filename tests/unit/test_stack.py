"""The local stack with stubs for its services: what is started, in which order, with what, and how it ends."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from services.cli.stack import Stack, StackSettings
from shared.settings import StartupError

# Takes a service's own command line; its health service is all there is to it.
STUB = """
import json, os, signal, sys
# Blocked before there are other threads, which would die of it, it waits for who asks for it, however early it comes.
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
from concurrent.futures import ThreadPoolExecutor
import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
service, flags = sys.argv[1], dict(flag[2:].split("=", 1) for flag in sys.argv[2:])
if flags.get("model") == "nowhere":
    sys.exit(print("outrider: model folder nowhere has no config.json", file=sys.stderr) or 78)
told = ("EXTRA", f"OUTRIDER_{service.upper()}_REDIS_URL", f"OUTRIDER_{service.upper()}_MEMORY_SHARE")
environment = {name: os.environ.get(name) for name in told}
print(json.dumps({"service": service, "flags": flags, "environment": environment}), flush=True)
server = grpc.server(ThreadPoolExecutor(2))
servicer = health.HealthServicer()
health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
server.add_insecure_port(flags["host"] + ":" + flags["port"])
servicer.set("", health_pb2.HealthCheckResponse.SERVING)
server.start()
signal.sigwait({signal.SIGTERM})
print("drained", flush=True)
"""


@pytest.fixture(autouse=True)
def stubs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every child becomes the stub: a stand-in for the interpreter drops `-m services.cli.main`."""
    stub = tmp_path / "stub.py"
    stub.write_text(STUB)
    interpreter = tmp_path / "python"
    interpreter.write_text(f'#!/bin/sh\nshift 2\nexec "{sys.executable}" "{stub}" "$@"\n')
    interpreter.chmod(0o755)
    monkeypatch.setattr("services.cli.stack.sys.executable", str(interpreter))
    monkeypatch.setattr("services.cli.stack.RedisServer", NoRedis)


class NoRedis:
    """Stands for the Redis server, whose own tests start a real one."""

    url = "redis://:secret@127.0.0.1:1/0"
    running = 0
    pid: int | None = 1

    def start(self) -> None:
        NoRedis.running += 1
        NoRedis.pid = 1

    def stop(self) -> None:
        NoRedis.running -= 1


async def test_redis_is_started_again_when_it_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.cli.stack._REDIS_WATCH_SECONDS", 0.01)
    async with Stack(StackSettings(port=0)) as stack:
        NoRedis.pid = None
        async with asyncio.timeout(10):
            while NoRedis.running < 2:  # noqa: ASYNC110 - another thread starts it
                await asyncio.sleep(0.01)
        assert ("stack", "redis ended; starting it again") in stack.lines
    NoRedis.running = 0


def started(stack: Stack) -> dict[str, dict[str, Any]]:
    """What each stub was started with, in the order in which they said so."""
    return {name: json.loads(line) for name, line in stack.lines if line.startswith("{")}


async def test_every_service_is_started_with_its_settings_and_drained_in_order() -> None:
    settings = StackSettings(
        target="big",
        draft="small",
        num_targets=2,
        port=0,
        dtype="float32",
        num_threads=1,
        environment={"target-1": {"EXTRA": "only here", "OUTRIDER_TARGET_MEMORY_SHARE": "0.1"}},
    )
    async with Stack(settings) as stack:
        assert NoRedis.running == 1
        said = started(stack)
        addresses = {name: process.address for name, process in stack.processes.items()}
        assert len(set(addresses.values())) == 4
        assert list(said)[-1] == "router"
        assert said["router"]["flags"]["targets"] == f"{addresses['target-0']},{addresses['target-1']}"
        assert said["router"]["flags"]["drafts"] == addresses["draft"]
        assert said["router"]["flags"]["tokenizer"] == "big"
        assert f"127.0.0.1:{said['router']['flags']['port']}" == stack.router_address
        assert said["draft"]["flags"]["model"] == "small"
        for name in ("target-0", "target-1"):
            flags = said[name]["flags"]
            assert (flags["model"], flags["dtype"], flags["num-threads"]) == ("big", "float32", "1")
            assert "device" not in flags
            assert said[name]["environment"]["OUTRIDER_TARGET_REDIS_URL"] == NoRedis.url
        assert said["router"]["environment"] == {
            "EXTRA": None,
            "OUTRIDER_ROUTER_REDIS_URL": NoRedis.url,
            "OUTRIDER_ROUTER_MEMORY_SHARE": None,
        }
        assert said["draft"]["environment"]["OUTRIDER_DRAFT_REDIS_URL"] == NoRedis.url
        # The workers share one machine's memory, unless somebody says how.
        assert said["draft"]["environment"]["OUTRIDER_DRAFT_MEMORY_SHARE"] == "0.2"
        shares = [said[name]["environment"]["OUTRIDER_TARGET_MEMORY_SHARE"] for name in ("target-0", "target-1")]
        assert shares == ["0.35", "0.1"]
        assert [said[name]["environment"]["EXTRA"] for name in ("target-0", "target-1")] == [None, "only here"]
    assert NoRedis.running == 0
    drained = [name for name, line in stack.lines if line == "drained"]
    assert drained[0] == "router"
    assert sorted(drained) == ["draft", "router", "target-0", "target-1"]


async def test_a_killed_target_comes_back_at_its_address() -> None:
    async with Stack(StackSettings(draft=None, port=0)) as stack:
        assert "draft" not in stack.processes
        assert "drafts" not in started(stack)["router"]["flags"]
        stack.kill("target-0")
        await stack.processes["target-0"].ready.wait()
        starts = [json.loads(line)["flags"]["port"] for name, line in stack.lines if name == "target-0" and "{" in line]
        assert len(starts) == 2
        assert starts[0] == starts[1]


async def test_a_service_that_cannot_start_ends_the_stack_with_its_message() -> None:
    with pytest.raises(StartupError, match=r"^target-0: model folder nowhere has no config\.json$"):
        await Stack(StackSettings(target="nowhere", port=0)).__aenter__()
    assert NoRedis.running == 0


async def test_a_taken_port_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            StartupError, match=f"port {port} on 127.0.0.1 cannot be listened on: Address already in use$"
        ):
            await Stack(StackSettings(port=port)).__aenter__()
    assert NoRedis.running == 0


async def test_a_cancelled_wait_drains_the_stack() -> None:
    stack = Stack(StackSettings(draft=None, port=0))
    entered = asyncio.Event()

    async def run() -> None:
        async with stack:
            entered.set()
            await stack.wait()

    running = asyncio.create_task(run())
    await entered.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert [name for name, line in stack.lines if line == "drained"] == ["router", "target-0"]
    assert NoRedis.running == 0


@pytest.mark.parametrize("models", [{"target": "/nowhere"}, {"draft": "./nowhere"}, {"head": "./nowhere"}])
async def test_a_model_folder_that_is_not_there_starts_nothing(models: dict[str, str]) -> None:
    stack = Stack(StackSettings(port=0, **models))  # type: ignore[arg-type]
    with pytest.raises(StartupError, match=r"there is no model folder .*nowhere"):
        await stack.__aenter__()
    assert not stack.processes


async def test_what_a_service_would_refuse_starts_nothing(tmp_path: Path) -> None:
    config = tmp_path / "outrider.toml"
    for text, complaint in (
        ("[router]\nmax_nodes = 3\n", "[router] has no setting 'max_nodes'"),
        ("[target]\nblock_size = 0\n", "target setting block_size"),
        ("[target\n", "is not TOML"),
    ):
        config.write_text(text)
        stack = Stack(StackSettings(port=0, config=str(config)))
        with pytest.raises(StartupError) as refusal:
            await stack.__aenter__()
        assert complaint in str(refusal.value)
        assert not started(stack)
    for wrong, complaint in (
        ({"dtype": "float15"}, r"target setting dtype .* is 'float15'"),
        ({"head": str(tmp_path), "early_exit": 1}, "target settings head and early_exit are both set"),
        (
            {"draft": str(tmp_path), "num_drafts": 0, "head": str(tmp_path)},
            "target settings draft and head are both set",
        ),
    ):
        with pytest.raises(StartupError, match=complaint):
            await Stack(StackSettings(port=0, **wrong)).__aenter__()
    assert NoRedis.running == 0


async def test_settings_that_the_stack_gives_itself_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "outrider.toml"
    config.write_text('[router]\nport = 7\nlog_level = "debug"\n[target]\nmodel = "other"\ndtype = "float32"\n')
    monkeypatch.setenv("OUTRIDER_DRAFT_REDIS_URL", "redis://:another@elsewhere:1")
    settings = StackSettings(target="big", num_targets=2, port=0, num_threads=1, config=str(config))
    async with Stack(settings) as stack:
        said = [line for name, line in stack.lines if name == "stack"]
    assert said == [
        f"{name} is not used: the stack gives its own"
        for name in ("target setting model", "draft setting redis_url", "router setting port")
    ]
