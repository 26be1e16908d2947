"""A server from its start to its drain, in this process and in its own."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc  # type: ignore[import-untyped]
from outrider.v1 import inference_pb2, inference_pb2_grpc

from shared.rpc.channel import connect
from shared.rpc.options import CHANNEL_OPTIONS
from shared.rpc.server import BindError, RpcServer
from shared.telemetry.tracing import configure
from tests.support.scripted_server import SERVICE, Scripted, health_of, running


async def test_health_is_not_serving_until_told_and_never_again_after_a_drain() -> None:
    async with running(Scripted()) as (server, channel):
        seen: list[list[str]] = []
        for serving in (None, True, False, True):
            if serving is not None:
                await server.set_serving(serving)
            seen.append([await health_of(channel, service) for service in ("", SERVICE)])
        assert seen == [["NOT_SERVING"] * 2, ["SERVING"] * 2, ["NOT_SERVING"] * 2, ["SERVING"] * 2]

        during: list[str] = []

        async def draining() -> None:
            await server.set_serving(True)
            during.append(await health_of(channel, ""))

        await server.drain(draining, grace=10)
        assert during == ["NOT_SERVING"]


async def test_reflection_lists_the_services_and_describes_them() -> None:
    async with running(Scripted()) as (_, channel):
        requests = [
            reflection_pb2.ServerReflectionRequest(list_services=""),
            reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE),
        ]
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter(requests))
        listed, described = [response async for response in call]
    names = {service.name for service in listed.list_services_response.service}
    assert names == {SERVICE, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}
    assert inference_pb2.DESCRIPTOR.serialized_pb in described.file_descriptor_response.file_descriptor_proto


async def test_an_address_in_use_is_one_clear_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        server = RpcServer(address, configure("test", None))
        with pytest.raises(BindError, match=f"cannot listen on {address}: in use, or not an address of this machine"):
            await server.start()
        await server.stop()


async def test_two_servers_never_share_a_port() -> None:
    async with running(Scripted()) as (first, _):
        second = RpcServer(first.address, configure("test", None))
        with pytest.raises(BindError):
            await second.start()
        await second.stop()


async def test_a_drain_refuses_new_rpcs_and_lets_running_ones_finish() -> None:
    finish = asyncio.Event()
    started = asyncio.Event()

    async def tokenize(_: object, __: object) -> inference_pb2.TokenizeResponse:
        started.set()
        await finish.wait()
        return inference_pb2.TokenizeResponse(token_ids=[7])

    async with running(Scripted(tokenize)) as (server, channel):
        stub = inference_pb2_grpc.InferenceStub(channel)
        # A watcher of health never ends by itself, and must not hold up the drain.
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=""))
        await watch.read()
        running_call = asyncio.ensure_future(stub.Tokenize(inference_pb2.TokenizeRequest(text="a")))
        await started.wait()
        drained = asyncio.Event()

        async def draining() -> None:
            drained.set()

        drain = asyncio.create_task(server.drain(draining, grace=60))
        await drained.wait()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GetModelInfo(inference_pb2.GetModelInfoRequest())
        assert (caught.value.code(), caught.value.details()) == (
            grpc.StatusCode.UNAVAILABLE,
            "the server is draining",
        )
        assert not drain.done()
        finish.set()
        assert list((await running_call).token_ids) == [7]
        async with asyncio.timeout(30):
            await drain


async def test_a_drain_cancels_what_outlives_its_grace() -> None:
    servicer = Scripted()
    async with running(servicer) as (server, channel):
        call = inference_pb2_grpc.InferenceStub(channel).Generate(inference_pb2.GenerateRequest(text="wait"))
        await call.read()
        await servicer.waiting.wait()

        async def draining() -> None: ...

        await server.drain(draining, grace=0.05)
        # Stopped means released, not only cancelled.
        assert servicer.released.is_set()
        assert await call.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


_PROCESS = """
import asyncio, sys
from outrider.v1 import inference_pb2_grpc
from shared.rpc.server import RpcServer
from shared.telemetry.logs import configure_logging
from shared.telemetry.tracing import configure
from tests.support.scripted_server import SERVICE, Scripted

async def main():
    server = RpcServer("127.0.0.1:0", configure("test", None))
    server.add(SERVICE, inference_pb2_grpc.add_InferenceServicer_to_server, Scripted())
    await server.start()
    await server.set_serving(True)
    async def draining():
        print("draining", flush=True)
        if sys.argv[1] == "stuck":
            await asyncio.Event().wait()
    print(server.address, flush=True)
    await server.serve(draining, grace=300)
    print("stopped", flush=True)

configure_logging("test", "INFO")
asyncio.run(main())
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("behaviour", ["quick", "stuck"])
async def test_a_signal_drains_and_a_second_one_ends(number: signal.Signals, behaviour: str) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _PROCESS, behaviour, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        address = (await process.stdout.readline()).decode().strip()
        async with connect(address) as channel:
            assert await health_of(channel, SERVICE) == "SERVING"
            process.send_signal(number)
            assert await process.stdout.readline() == b"draining\n"
            if behaviour == "stuck":
                assert await health_of(channel, SERVICE) == "NOT_SERVING"
                process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(60):
                out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert out == b"stopped\n"
    assert process.returncode == 0
    messages = [json.loads(line)["message"] for line in err.splitlines()]
    expected = ["listening", "draining"] + (["drain cut short by SIGTERM"] if behaviour == "stuck" else [])
    assert messages == expected


async def test_a_silent_peer_is_found_dead_in_the_time_that_the_options_say() -> None:
    """Of a stopped process's open stream, with every time of the options a tenth of what it is: 4 seconds of 40."""
    scaled = [
        (name, value // 10 if "keepalive_time" in name or "ping_timeout" in name else value)
        for name, value in CHANNEL_OPTIONS
    ]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _PROCESS, "quick", stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        address = (await process.stdout.readline()).decode().strip()
        async with grpc.aio.insecure_channel(address, options=scaled) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=""))
            await watch.read()
            process.send_signal(signal.SIGSTOP)
            # The transport's own default for a ping's answer is a minute.
            async with asyncio.timeout(30):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await watch.read()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    finally:
        process.kill()
        await process.wait()
