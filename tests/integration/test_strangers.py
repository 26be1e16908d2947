"""Who connects and is no client of ours: another protocol, nothing at all, or far too many."""

from __future__ import annotations

import asyncio
import resource
import socket
import ssl
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]

import shared.rpc.server as rpc_server
from services.cli.certs import write_certificates
from shared.rpc.channel import connect
from shared.rpc.health import LIVE
from shared.rpc.open_files import SERVICE_SHARE, allow_open_files, most_connections
from shared.rpc.options import server_options
from shared.rpc.server import RpcServer
from shared.telemetry.tracing import configure
from tests.support.service import generate, inference, running_stack, wait_until_idle

# What HTTP/2 begins with, and a frame of settings without any.
HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\x04\0\0\0\0\0"
HTTP1 = b"GET /v1/models HTTP/1.1\r\nHost: outrider\r\n\r\n"
NUM_IDLE = 10_000


def client_hello() -> bytes:
    outgoing = ssl.MemoryBIO()
    tls = ssl.create_default_context().wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="outrider")
    with pytest.raises(ssl.SSLWantReadError):
        tls.do_handshake()
    return outgoing.read()


@asynccontextmanager
async def serving(certificates: Path | None = None) -> AsyncIterator[tuple[str, grpc.aio.Channel]]:
    """A server's address, and a channel to it that nothing has been sent by."""
    credentials, channel_credentials = None, None
    if certificates is not None:
        write_certificates(certificates, "default", ["localhost", "127.0.0.1"], timedelta(days=1))
        read = {name: (certificates / f"{name}.pem").read_bytes() for name in ("ca", "router", "router-key")}
        credentials = grpc.ssl_server_credentials([(read["router-key"], read["router"])])
        channel_credentials = grpc.ssl_channel_credentials(read["ca"])
    server = RpcServer("127.0.0.1:0", configure("test", None), credentials=credentials)
    await server.start()
    channel = (
        connect(server.address)
        if channel_credentials is None
        else grpc.aio.secure_channel(server.address, channel_credentials)
    )
    try:
        async with channel:
            yield server.address, channel
    finally:
        await server.stop()


async def health(channel: grpc.aio.Channel, metadata: tuple[tuple[str, str], ...] = ()) -> str:
    """What is always said, or the status of who is not let through."""
    stub: Any = health_pb2_grpc.HealthStub(channel)
    try:
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=LIVE), timeout=30, metadata=metadata)
    except grpc.aio.AioRpcError as error:
        return error.code().name
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


async def opened(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = address.rpartition(":")
    return await asyncio.open_connection(host, int(port))


async def until_hung_up_on(reader: asyncio.StreamReader, seconds: float = 30.0) -> bytes:
    """All that came. Raises TimeoutError if the connection stays open."""
    async with asyncio.timeout(seconds):
        try:
            return await reader.read()
        except ConnectionResetError:
            return b""


@pytest.mark.parametrize(
    ("encrypted", "said"),
    [
        (False, HTTP1),
        (False, client_hello()),
        (False, b"\0" * 4096),
        (False, HTTP2[:24] + b"\xff\xff\xff\x00\0\0\0\0\0" + b"x" * 4096),
        (True, HTTP1),
        (True, HTTP2),
        (True, b"\x16\x03\x01\xff\xff" + b"\xff" * 4096),
    ],
    ids=["HTTP/1", "TLS", "zeros", "a frame too long", "HTTP/1 to TLS", "HTTP/2 to TLS", "not quite TLS"],
)
async def test_another_protocol_is_hung_up_on(tmp_path: Path, encrypted: bool, said: bytes) -> None:
    async with serving(tmp_path / "certificates" if encrypted else None) as (address, channel):
        reader, writer = await opened(address)
        writer.write(said)
        await until_hung_up_on(reader)
        writer.close()
        assert await health(channel) == "SERVING"


@pytest.mark.parametrize(
    "metadata",
    [(("x", "y" * 100_000),), tuple((f"x-{i}", "y" * 90) for i in range(500)), (("authorization", "Bearer " * 9000),)],
    ids=["one long", "many", "a key"],
)
async def test_metadata_beyond_the_limit(metadata: tuple[tuple[str, str], ...]) -> None:
    async with serving() as (_, channel):
        assert await health(channel) == "SERVING"
        assert await health(channel, metadata) == "RESOURCE_EXHAUSTED"
        # On the same connection.
        assert await health(channel) == "SERVING"


@pytest.mark.parametrize("encrypted", [False, True])
@pytest.mark.parametrize("said", [b"", HTTP2[:7], client_hello()[:9]], ids=["nothing", "half HTTP/2", "half TLS"])
async def test_who_does_not_get_through_the_handshake_has_so_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encrypted: bool, said: bytes
) -> None:
    def in_half_a_second(*limits: int) -> tuple[tuple[str, int], ...]:
        options = dict(server_options(*limits))
        assert options["grpc.server_handshake_timeout_ms"] == 20_000
        return tuple((options | {"grpc.server_handshake_timeout_ms": 500}).items())

    monkeypatch.setattr(rpc_server, "server_options", in_half_a_second)
    async with serving(tmp_path / "certificates" if encrypted else None) as (address, channel):
        reader, writer = await opened(address)
        writer.write(said)
        await until_hung_up_on(reader)
        writer.close()
        assert await health(channel) == "SERVING"


async def test_connections_too_many_are_hung_up_on_and_those_there_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc_server, "most_connections", lambda share: 4)
    async with serving() as (address, channel):
        assert await health(channel) == "SERVING"
        silent = [await opened(address) for _ in range(3)]
        late, late_writer = await opened(address)
        assert await until_hung_up_on(late) == b""
        async with connect(address) as other:
            assert await health(other) == "UNAVAILABLE"
            assert await health(channel) == "SERVING"
            for _, writer in silent:
                writer.close()
            # As soon as there is room: the channel connects again by itself.
            async with asyncio.timeout(30):
                while await health(other) != "SERVING":  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
        late_writer.close()


def test_a_process_takes_the_open_files_that_it_may_have() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, hard), hard))
        assert most_connections(SERVICE_SHARE) == 192
        allow_open_files()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (min(hard, 65_536), hard)
        assert most_connections(SERVICE_SHARE) == min(16_384, int(SERVICE_SHARE * min(hard, 65_536)))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_ten_thousand_that_connect_and_ask_nothing() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if SERVICE_SHARE * min(hard, 65_536) < NUM_IDLE + 16:
        pytest.skip(f"a process may open {hard} files here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        async with running_stack() as stack, inference(stack) as stub:
            expected = (await generate(stub, "def main():\n", seed=1, max_tokens=16)).token_ids
            pid = stack.processes["router"].pid
            assert pid is not None
            before = resident_mib(pid)
            idle = []
            for _ in range(NUM_IDLE):
                reader, writer = await opened(stack.router_address)
                # Closed without a farewell: so many ports in TIME_WAIT are a burden to those who come after.
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                writer.write(HTTP2)
                idle.append((reader, writer))
            async with asyncio.timeout(60):
                # Every one has been taken: its settings came.
                for reader, _ in idle:
                    assert len(await reader.readexactly(9)) == 9
            assert (await generate(stub, "def main():\n", seed=1, max_tokens=16)).token_ids == expected
            async with inference(stack) as other:
                assert (await generate(other, "def main():\n", seed=1, max_tokens=16)).token_ids == expected
            assert resident_mib(pid) - before < 400
            for _, writer in idle:
                writer.close()
            assert (await generate(stub, "def main():\n", seed=1, max_tokens=16)).token_ids == expected
            await wait_until_idle(stack)
            assert not stack.processes["router"].restarts
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def resident_mib(pid: int) -> float:
    return int(Path(f"/proc/{pid}/status").read_text().split("VmRSS:")[1].split()[0]) / 1024
