"""`outrider health` against real servers: what it says, and its exit status."""

from __future__ import annotations

import asyncio
import socket

from typer.testing import CliRunner, Result

from services.cli.app import app
from shared.rpc.server import RpcServer
from shared.telemetry.tracing import configure

# A sync client and a server of this event loop: the command is run in a thread.
Outcome = tuple[int, str, str]


async def outcome(*arguments: str) -> Outcome:
    result: Result = await asyncio.to_thread(CliRunner().invoke, app, ["health", *arguments])
    return result.exit_code, result.stdout, result.stderr


async def test_what_a_server_says() -> None:
    server = RpcServer("127.0.0.1:0", configure("test", None))
    await server.start()
    try:
        assert await outcome(server.address) == (1, "NOT_SERVING\n", "")
        assert await outcome(server.address, "--service=live") == (0, "SERVING\n", "")
        await server.set_serving(True)
        assert await outcome(server.address) == (0, "SERVING\n", "")
        unknown = (1, "", f"outrider: {server.address} has no service outrider.v1.Nothing\n")
        assert await outcome(server.address, "--service=outrider.v1.Nothing") == unknown
    finally:
        await server.stop()


async def test_nobody_there() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert await outcome(address) == (1, "", f"outrider: no server answers at {address}\n")


async def test_who_accepts_and_says_nothing() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        expected = (1, "", f"outrider: no answer from {address} within 0.5 s\n")
        assert await outcome(address, "--timeout=0.5") == expected


async def test_what_is_no_address() -> None:
    code, _, message = await outcome("nowhere")
    assert code == 1
    assert message.startswith("outrider: n")
    assert "nowhere" in message
    assert message.count("\n") == 1
