"""Malformed and hostile messages to every method of every service: a sample; make fuzz sends a million."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from outrider.v1 import draft_pb2, draft_pb2_grpc, inference_pb2, target_pb2, transfer_pb2

from shared.rpc.channel import connect
from tests.support.fuzz import METHODS, Fuzz, Method
from tests.support.service import generate, inference, running_stack, wait_until_idle

NUM_MESSAGES = 1500


async def test_every_method_refuses_what_it_cannot_take() -> None:
    async with running_stack() as stack, inference(stack) as stub:
        expected = (await generate(stub, "def main():\n", seed=1, max_tokens=16)).token_ids
        fuzz = Fuzz(seed=1)
        for name, process in list(stack.processes.items()):
            await fuzz.run(process.address, METHODS[name.partition("-")[0]], NUM_MESSAGES, connect)
        assert fuzz.unexpected == {}
        assert fuzz.num_messages >= 3 * NUM_MESSAGES
        assert {process.restarts for process in stack.processes.values()} == {0}
        await wait_until_idle(stack)
        assert (await generate(stub, "def main():\n", seed=1, max_tokens=16)).token_ids == expected


async def test_what_would_have_ended_a_drafter_ends_the_stream_it_came_by_alone() -> None:
    hostile = draft_pb2.DraftRequest()
    hostile.operations.add().propose.CopyFrom(draft_pb2.Propose(base_length=(1 << 32) - 1, token_ids=[1]))
    async with running_stack() as stack, inference(stack) as stub:
        drafter = stack.processes["draft"]
        async with connect(drafter.address) as channel:
            rpc: Any = draft_pb2_grpc.DrafterStub(channel)
            call = rpc.Serve()
            await call.write(hostile)
            with pytest.raises(grpc.aio.AioRpcError, match=r"operations\[0\].propose.base_length is 4294967295"):
                async for _ in call:
                    pass
        generated = await generate(stub, "def main():\n", gamma=2, seed=1, max_tokens=16)
        assert generated.usage.draft_tokens
        assert drafter.restarts == 0


@pytest.mark.parametrize("service", METHODS)
async def test_all_methods_are_fuzzed(service: str) -> None:
    """By the services' own descriptors: none was forgotten."""
    services = {
        "router": [inference_pb2.DESCRIPTOR.services_by_name["Inference"]],
        "target": [
            target_pb2.DESCRIPTOR.services_by_name["Target"],
            transfer_pb2.DESCRIPTOR.services_by_name["Transfer"],
        ],
        "draft": [draft_pb2.DESCRIPTOR.services_by_name["Drafter"]],
    }[service]
    expected = {
        (f"/{each.full_name}/{method.name}", method.input_type.full_name, method.client_streaming)
        for each in services
        for method in each.methods
    }

    def described(method: Method) -> tuple[str, str, bool]:
        return method.path, method.request.DESCRIPTOR.full_name, method.streams

    assert {described(method) for method in METHODS[service] if method.path.startswith("/outrider.")} == expected
