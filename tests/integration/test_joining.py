"""Workers that come and go while the router runs: it follows what registers in Redis."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import pytest
from outrider.v1 import inference_pb2, worker_pb2

from services.cli.stack import Stack as LocalStack
from services.cli.stack import StackSettings
from services.router.workers import fleet as fleet_module
from services.router.workers.fleet import Fleet
from shared.models import DEMO_TARGET
from shared.redis.server import RedisServer
from shared.registry.listing import Listing
from shared.registry.member import Member
from shared.security.identity import Service
from tests.support.fake_drafter import FakeDrafter
from tests.support.fake_target import FakeTarget
from tests.support.fake_workers import Worker
from tests.support.greedy import python_prompts, references
from tests.support.router_stack import FINGERPRINT, until
from tests.support.service import generate, inference, wait_until_idle

pytestmark = pytest.mark.timeout(120)


@asynccontextmanager
async def listed(
    server: RedisServer, worker: Worker, kind: str = "target", role: str = "both"
) -> AsyncIterator[Member]:
    listing = Listing(kind, worker.info.instance_id, worker.address, role if kind == "target" else "")  # type: ignore[arg-type]
    async with Member(server.url, "default", listing, lease_seconds=1.0) as member:
        yield member


@pytest.fixture
def quick_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "_FOLLOW_SECONDS", 0.05)


async def test_of_many_listed_at_once_some_are_connected_to_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "_MOST_NEW", 3)
    fleet = Fleet([], [], FINGERPRINT, 8, 16, "redis://127.0.0.1:1")
    addresses = [f"127.0.0.1:{port}" for port in range(1, 9)]
    try:
        for found in (3, 6, 8, 8):
            fleet._take_in(fleet.targets, addresses, fleet._target)
            assert [link.address for link in fleet.targets] == addresses[:found]
        fleet._take_in(fleet.targets, addresses[6:], fleet._target)
        assert [link.address for link in fleet.targets] == addresses[6:]
        assert len(fleet._tasks) == 2, "the others are not tried any more"
    finally:
        await fleet.close()


@pytest.mark.usefixtures("quick_reading")
async def test_links_follow_the_list() -> None:
    with RedisServer() as server:
        first, second = FakeTarget(FINGERPRINT), FakeTarget(FINGERPRINT, worker_pb2.ROLE_PREFILL)
        drafter = FakeDrafter(FINGERPRINT)
        for worker in (first, second, drafter):
            await worker.start()
        fleet = Fleet([], [], FINGERPRINT, 8, 16, server.url)
        fleet.start()
        try:
            assert not fleet.usable
            async with listed(server, first) as member:
                await until(lambda: fleet.usable, "the first is found")
                async with listed(server, second, role="prefill"), listed(server, drafter, "draft", ""):
                    await until(lambda: len(fleet.targets) == 2 and len(fleet.drafts) == 1, "the others joined")
                    await until(lambda: all(link.connected for link in fleet.targets), "connected")
                    await until(lambda: fleet.drafts[0].connected, "the drafter, too")
                    assert sorted(link.role for link in fleet.targets) == ["both", "prefill"]
                    assert fleet.choose_draft() is fleet.drafts[0]
                # Unlisted, but there: it may be that Redis forgot.
                await until(lambda: len(fleet.targets) == 2, "kept")
                await second.stop()
                await drafter.stop()
                await until(lambda: len(fleet.targets) == 1 and not fleet.drafts, "gone and forgotten")
                await member.withdraw()
            assert fleet.usable, "nothing new comes of its having left the list, until it is lost"
        finally:
            await asyncio.wait_for(fleet.close(), 5)
            for worker in (first, second, drafter):
                await worker.stop()


@pytest.mark.usefixtures("quick_reading")
async def test_while_redis_is_away_those_known_stay() -> None:
    with RedisServer() as server:
        worker = FakeTarget(FINGERPRINT)
        await worker.start()
        fleet = Fleet([], [], FINGERPRINT, 8, 16, server.url)
        fleet.start()
        try:
            async with listed(server, worker):
                await until(lambda: fleet.usable, "found")
                await asyncio.to_thread(server.stop)
                await worker.stop()
                await until(lambda: not fleet.usable, "lost")
                await worker.start()
                await until(lambda: fleet.usable, "back at its old address, with nobody to ask for it")
                await asyncio.to_thread(server.start)
                await until(lambda: len(fleet.targets) == 1 and fleet.usable, "and still there")
        finally:
            await asyncio.wait_for(fleet.close(), 5)
            await worker.stop()


class RegisteredStack(LocalStack):
    """Its router knows no worker but those that register."""

    def _add(self, name: str, address: str, flags: Mapping[str, object], *, service: Service) -> None:
        known = ("targets", "drafts") if service == "router" else ()
        super()._add(name, address, {key: value for key, value in flags.items() if key not in known}, service=service)


async def test_a_router_serves_with_what_registers() -> None:
    [reference] = references(DEMO_TARGET, python_prompts(40), 1, 32)
    settings = StackSettings(port=0, dtype="float32", num_threads=1, num_targets=2, drain_seconds=5.0)
    async with RegisteredStack(settings) as stack:
        async with inference(stack) as stub:
            for name in ("target-0", "target-1"):
                answer = await generate(stub, reference.prompt, gamma=2, max_tokens=32, temperature=0, ignore_eos=True)
                assert answer.token_ids == reference.token_ids
                stack.kill(name)
            answer = await generate(stub, reference.prompt, gamma=2, max_tokens=32, temperature=0, ignore_eos=True)
            assert answer.token_ids == reference.token_ids
            model = await stub.GetModelInfo(inference_pb2.GetModelInfoRequest())
            assert model.draft_model == "draft"
        for process in stack.processes.values():
            await process.ready.wait()
        await wait_until_idle(stack)
