"""Target workers that fail, hang, have less room than others or go away: no token is lost, and requests end."""

from __future__ import annotations

import asyncio
import random

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]

from services.router import server as router_server
from services.router.workers import breaker, draft_link, silence
from services.router.workers import fleet as fleet_module
from shared.rpc.channel import connect
from shared.rpc.errors import Internal
from shared.rpc.options import MAX_MESSAGE_BYTES
from shared.sampling.params import SamplingParams
from tests.support.fake_drafter import Answer
from tests.support.fake_target import Fault
from tests.support.fake_workers import plain_output
from tests.support.router_stack import GREEDY, MAX_TOKENS, PROMPT, FirstOnes, Output, greedy, read_all, stack, until

pytestmark = pytest.mark.timeout(60)


# Target workers that fail


@pytest.mark.parametrize("num_draft_tokens", [0, 3, None])
@pytest.mark.parametrize("fault", list(Fault))
async def test_a_fault_in_any_step_costs_no_token(fault: Fault, num_draft_tokens: int | None) -> None:
    async with stack() as s:
        num_hit, link = 0, s.fleet.targets[0]
        for step in range(MAX_TOKENS):
            # One that aborts behind the last token of all is connected for a moment still.
            num_lost = num_hit if fault in (Fault.ABORT_BEFORE, Fault.ABORT_AFTER) else 0
            await until(lambda n=num_lost: s.fleet.usable and link.epoch > n, "worker connected")  # type: ignore[misc]
            first = s.target.num_steps
            s.target.faults = {first + step: fault}
            output = await s.generate(greedy(num_draft_tokens), timeout=20)
            assert output.tokens == {0: GREEDY}, f"{fault} in step {step}"
            num_hit += not s.target.faults
            if s.target.faults:
                break
        assert num_hit >= 4
        s.target.faults = {}
        await until(lambda: s.fleet.usable, "worker connected again")
        await s.until_idle()


@pytest.mark.parametrize("num_draft_tokens", [0, 3])
async def test_seeded_sequences_survive_faults_together(num_draft_tokens: int) -> None:
    async with stack(num_targets=2) as s:
        for target in s.targets:
            target.faults = {2: Fault.ABORT_AFTER, 5: Fault.FAILED, 9: Fault.ABORT_BEFORE}
            target.gate.clear()
        running = [
            asyncio.create_task(s.generate(greedy(num_draft_tokens, temperature=1.0, seed=seed, n=3)))
            for seed in range(6)
        ]
        await until(lambda: sum(target.num_sequences for target in s.targets) == 18, "all placed")
        assert all(target.num_sequences for target in s.targets), "on both"
        for target in s.targets:
            target.gate.set()
        for seed, output in enumerate(await asyncio.gather(*running)):
            assert not any(target.faults for target in s.targets)
            assert output.tokens == {i: plain_output(PROMPT, MAX_TOKENS, 1 + seed + i) for i in range(3)}
        await s.until_idle()


async def test_any_number_of_failures_is_survived_if_tokens_come_in_between() -> None:
    async with stack() as s:
        s.target.faults = dict.fromkeys(range(1, 60, 3), Fault.FAILED)
        assert (await s.generate(greedy(0, max_tokens=60))).tokens == {0: plain_output(PROMPT, 60)}
        assert len(s.target.prefills) > 10
        await s.until_idle()


async def test_a_worker_that_dies_and_comes_back_goes_on() -> None:
    async with stack() as s:
        chunks = aiter(s.stub.Generate(greedy(3, max_tokens=200)))
        output = Output()
        output.take(await anext(chunks))
        await s.target.stop()
        await until(lambda: not s.fleet.usable, "loss noticed")
        await s.target.start()
        async for chunk in chunks:
            output.take(chunk)
        assert len(s.target.prefills) == 2
        assert output.tokens == {0: plain_output(PROMPT, 200)}
        assert output.usage is not None
        assert output.usage.output_tokens == 200
        await s.until_idle()


async def test_another_worker_takes_over() -> None:
    async with stack(num_targets=2) as s:
        s.targets[0].gate.clear()
        s.targets[1].gate.clear()
        running = asyncio.create_task(s.generate(greedy(3)))
        await until(lambda: any(target.num_sequences for target in s.targets), "prefill arrived")
        [victim] = [target for target in s.targets if target.num_sequences]
        await victim.stop()
        for target in s.targets:
            target.gate.set()
        assert (await running).tokens == {0: GREEDY}
        await s.until_idle()


@pytest.mark.parametrize("fault", [Fault.UNKNOWN, Fault.FAILED, Fault.ABORT_BEFORE])
async def test_a_worker_that_always_fails_is_unavailable(fault: Fault) -> None:
    async with stack() as s:
        s.target.every_step = fault
        with pytest.raises(grpc.aio.AioRpcError, match="failed 5 times in a row") as caught:
            await s.generate(greedy(3))
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        await s.until_idle()


@pytest.mark.parametrize("fault", [Fault.UNKNOWN, Fault.FAILED, Fault.ABORT_BEFORE])
async def test_a_broken_worker_does_not_swallow_the_traffic(fault: Fault) -> None:
    """Idle because it serves nobody, it is where every request would go; each costs it one try, until it is left
    alone."""
    async with stack(num_targets=2) as s:
        s.fleet.placer._random = FirstOnes()
        broken, healthy = s.targets
        broken.every_step = fault
        outputs = [await s.generate(greedy(3)) for _ in range(10)]
        assert all(output.tokens == {0: GREEDY} for output in outputs)
        assert len(healthy.prefills) == 10
        # Three to open the breaker; a probe a second, two, four later.
        assert 1 <= len(broken.prefills) <= 3 + 3
        broken.every_step = None
        link = s.fleet.targets[0]
        await until(lambda: link.connected and link.breaker.allows, "half-open")
        num_prefills = len(broken.prefills)
        # Of workers that are as good as each other one is drawn.
        s.fleet.placer._random = random.Random(0)
        for _ in range(24):
            assert (await s.generate(greedy(3))).tokens == {0: GREEDY}
        assert len(broken.prefills) >= num_prefills + 3, "back, it gets its share"
        await s.until_idle()


async def test_a_request_that_no_worker_can_compute_does_not_stop_the_others() -> None:
    async with stack(num_targets=2) as s:
        for target in s.targets:
            target.every_step = Fault.FAILED
        with pytest.raises(grpc.aio.AioRpcError, match="failed 5 times in a row") as caught:
            await s.generate(greedy(3, n=4))
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert not any(target.address in (caught.value.details() or "") for target in s.targets)
        assert all(link.breaker.allows for link in s.fleet.targets), "one request is no proof"
        for target in s.targets:
            target.every_step = None
        assert (await s.generate(greedy(3))).tokens == {0: GREEDY}
        await s.until_idle()


async def test_with_every_breaker_open_requests_are_still_served() -> None:
    async with stack(num_targets=2) as s:
        for link in s.fleet.targets:
            link.breaker.trip()
        assert (await s.generate(greedy(3))).tokens == {0: GREEDY}
        await s.until_idle()


async def test_a_probe_that_is_cancelled_lets_the_next_one_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(breaker, "_MIN_BACKOFF_SECONDS", 0.0)
    async with stack(num_targets=2) as s:
        s.fleet.placer._random = FirstOnes()
        link = s.fleet.targets[0]
        link.breaker = breaker.CircuitBreaker()
        link.breaker.trip()
        s.target.gate.clear()
        call = s.stub.Generate(greedy(0))
        reading = asyncio.create_task(read_all(call))
        await until(lambda: s.target.num_sequences == 1, "the probe arrived")
        assert not link.breaker.allows
        call.cancel()
        await reading
        await until(lambda: link.breaker.allows, "another may go")
        s.target.gate.set()
        await s.until_idle()


async def test_a_worker_that_says_of_itself_what_cannot_be_stops_nobody() -> None:
    async with stack(num_targets=2) as s:
        odd, link = s.targets[0], s.fleet.targets[0]
        await odd.stop()
        await until(lambda: not link.connected, "gone")
        del odd.info.step_costs[:]
        num_described = odd.num_described
        await odd.start()
        await until(lambda: odd.num_described > num_described + 1, "asked what it is, and again")
        assert not link.connected
        assert not s.fleet.failed.done()
        assert (await s.generate(greedy(3))).tokens == {0: GREEDY}
        odd.info.step_costs.add(num_tokens=1, seconds=0.01)
        await until(lambda: link.connected, "right again")
        await s.until_idle()


# Target workers that hang


@pytest.fixture
def quick_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    watch_quickly(monkeypatch)


def watch_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits of silence a hundredth of what they are."""
    monkeypatch.setattr(fleet_module, "_WATCH_SECONDS", 0.005)
    for name in ("_OVERDUE_SECONDS", "_HUNG_SECONDS", "_SOLE_HUNG_SECONDS"):
        monkeypatch.setattr(silence, name, getattr(silence, name) / 100)
    for name in ("_OVERDUE_STEPS", "_HUNG_STEPS", "_SOLE_HUNG_STEPS"):
        monkeypatch.setattr(silence, name, 0.0)


@pytest.mark.parametrize("num_draft_tokens", [0, 3])
async def test_streams_are_moved_off_a_worker_that_hangs(
    num_draft_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with stack(num_targets=2) as s:
        hanging, other = s.targets
        hanging.gate.clear()
        other.gate.clear()
        running = [
            asyncio.create_task(s.generate(greedy(num_draft_tokens, temperature=1.0, seed=seed))) for seed in range(8)
        ]
        await until(lambda: all(target.num_sequences == 4 for target in s.targets), "four on each")
        # Only now: one that is overdue a moment before the other gets nothing more.
        watch_quickly(monkeypatch)
        other.gate.set()
        for seed, task in enumerate(running):
            assert (await task).tokens == {0: plain_output(PROMPT, MAX_TOKENS, 1 + seed)}
        assert len(other.prefills) == 8
        # It was hung up on: when it wakes it finds its stream ended, and drops what was there.
        hanging.gate.set()
        await s.until_idle()


@pytest.mark.usefixtures("quick_watch")
async def test_nothing_is_placed_on_a_worker_whose_results_are_overdue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(silence, "_HUNG_SECONDS", 1000.0)
    async with stack(num_targets=2) as s:
        s.fleet.placer._random = FirstOnes()
        hanging, other = s.targets
        # With limits as short as these a busy machine alone may make it late.
        monkeypatch.setattr(s.fleet.targets[1]._silence, "overdue", lambda _: False)
        hanging.gate.clear()
        first = asyncio.create_task(s.generate(greedy(0)))
        await until(lambda: s.fleet.targets[0].overdue, "results overdue")
        outputs = await asyncio.gather(*(s.generate(greedy(0)) for _ in range(8)))
        assert all(output.tokens == {0: GREEDY} for output in outputs)
        assert (len(hanging.prefills), len(other.prefills)) == (1, 8)
        hanging.gate.set()
        assert (await first).tokens == {0: GREEDY}
        assert not s.fleet.targets[0].overdue
        assert len(other.prefills) == 8, "late is not lost"
        await s.until_idle()


@pytest.mark.usefixtures("quick_watch")
async def test_the_only_worker_is_waited_for_longer_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    async with stack() as s:
        [link] = s.fleet.targets
        s.target.gate.clear()
        running = asyncio.create_task(s.generate(greedy(0)))
        await until(lambda: link.overdue, "results overdue")
        epoch = link.epoch
        second = asyncio.create_task(s.generate(greedy(0)))
        await until(lambda: s.target.num_sequences == 2, "placed there for want of another")
        await until(lambda: link.hung(sole=False), "two would be enough to move")
        assert link.epoch == epoch, "nowhere to move to: waited for"
        await until(lambda: link.epoch > epoch, "given up in the end")
        s.target.gate.set()
        assert (await running).tokens == (await second).tokens == {0: GREEDY}
        await s.until_idle()


@pytest.mark.usefixtures("quick_watch")
async def test_a_worker_that_waits_for_the_drafter_is_not_overdue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_link, "_LEAST_PATIENCE_SECONDS", 0.3)
    async with stack(num_targets=2) as s:
        assert s.drafter is not None
        s.drafter.answers = {0: Answer.HANG}
        epochs = [link.epoch for link in s.fleet.targets]
        assert (await s.generate(greedy(3))).tokens == {0: GREEDY}
        assert [link.epoch for link in s.fleet.targets] == epochs
        await s.until_idle()


# Target workers with less room, or on their way out


async def test_a_sequence_never_fails_over_onto_a_worker_that_has_no_room_for_it() -> None:
    async with stack(num_targets=2) as s:
        large, small = s.targets
        await small.stop()
        await until(lambda: not s.fleet.targets[1].connected, "loss noticed")
        s.servicer._settings = s.servicer._settings.model_copy(update={"failover_seconds": 0.3})
        large.gate.clear()
        running = asyncio.create_task(s.generate(greedy(0)))
        waiting = asyncio.create_task(s.generate(greedy(0)))
        await until(lambda: large.num_sequences == 2, "prefills arrived")
        small.info.num_blocks = 1
        await small.start()
        await until(lambda: s.fleet.targets[1].connected, "small worker connected")
        assert s.fleet.usable
        await large.stop()
        for task in (running, waiting):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await task
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            room = len(PROMPT) + MAX_TOKENS
            assert caught.value.details() == f"no target worker that has room for {room} tokens came back in time"
        assert small.prefills == []
        await s.until_idle()


async def test_the_limits_are_those_of_the_workers_that_are_there() -> None:
    async with stack(num_targets=2) as s:
        large, small = s.targets
        await small.stop()
        small.info.max_context = 40
        await small.start()
        longer = greedy(0, max_tokens=60)
        await until(lambda: s.fleet.model.max_context == 40, "small worker connected")
        with pytest.raises(grpc.aio.AioRpcError, match="max_tokens") as caught:
            await s.generate(longer)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        await small.stop()
        await until(lambda: s.fleet.model.max_context == 512, "small worker gone")
        assert (await s.generate(longer)).tokens == {0: plain_output(PROMPT, 60)}
        assert len(large.prefills) == 1
        await s.until_idle()


async def test_health_is_not_serving_once_every_target_drains() -> None:
    async with stack(num_targets=2) as s, connect(s.address) as channel:
        reporting = asyncio.create_task(router_server._report_health(s.fleet, s.server))
        try:
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=""))
            seen = aiter(watch)
            while (await anext(seen)).status != health_pb2.HealthCheckResponse.SERVING:
                pass
            await s.targets[0].announce_drain()
            await until(lambda: s.fleet.targets[0].draining, "drain heard of")
            await s.targets[1].announce_drain()
            assert (await anext(seen)).status == health_pb2.HealthCheckResponse.NOT_SERVING
            watch.cancel()
        finally:
            reporting.cancel()
            await asyncio.gather(reporting, return_exceptions=True)


async def test_no_worker_back_in_time_is_unavailable() -> None:
    async with stack() as s:
        s.servicer._settings = s.servicer._settings.model_copy(update={"failover_seconds": 0.1})
        s.target.gate.clear()
        running = asyncio.create_task(s.generate(greedy(3, n=2)))
        await until(lambda: s.target.num_sequences == 2, "prefill arrived")
        await s.target.stop()
        with pytest.raises(grpc.aio.AioRpcError, match=r"no target worker came back in time") as caught:
            await running
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        await s.until_idle()
        with pytest.raises(grpc.aio.AioRpcError, match="no target worker") as caught:
            await s.generate()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_draining_worker_gets_nothing_new() -> None:
    async with stack(num_targets=2) as s:
        draining, other = s.targets
        await draining.announce_drain()
        await until(lambda: s.fleet.targets[0].draining, "drain heard of")
        outputs = await asyncio.gather(*(s.generate(greedy(3)) for _ in range(4)))
        assert all(output.tokens == {0: GREEDY} for output in outputs)
        assert draining.prefills == []
        assert len(other.prefills) == 4
        await s.until_idle()


async def test_what_one_message_cannot_carry_goes_out_in_several() -> None:
    async with stack() as s:
        link = s.fleet.targets[0]
        epoch = link.epoch
        params, salt = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS), bytes(15 * 2**20)
        # 75 MiB that have come together before the writer's turn.
        lanes = [link.prefill(PROMPT, len(PROMPT), [params], 1, salt, "")[0] for _ in range(5)]
        for lane in lanes:
            assert list((await lane.next()).result.token_ids) == GREEDY[:1]
        with pytest.raises(Internal, match="at most"):
            link.prefill(PROMPT, len(PROMPT), [params], 1, bytes(MAX_MESSAGE_BYTES), "")
        assert link.epoch == epoch
        assert link.num_lanes == 5
        for lane in lanes:
            lane.release()
        await s.until_idle()


@pytest.mark.parametrize("fault", [Fault.ABORT_BEFORE, Fault.FAILED])
async def test_clients_are_not_told_where_the_workers_are(fault: Fault, caplog: pytest.LogCaptureFixture) -> None:
    async with stack() as s:
        s.target.every_step = fault
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await s.generate(timeout=20)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        details = caught.value.details() or ""
        assert "target workers failed" in details
        assert "127.0.0.1" not in details
        assert str(s.target.port) not in details
        logged = [record.getMessage() for record in caplog.records if "times in a row, last" in record.getMessage()]
        assert len(logged) == 1
        assert (s.target.address if fault is Fault.ABORT_BEFORE else "STEP_STATUS_FAILED") in logged[0]
