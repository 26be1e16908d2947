"""The router from call to last token, over real gRPC, with workers that have no model and fail on demand."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]
from outrider.v1 import inference_pb2, inference_pb2_grpc

from services.router import breaker, chunk_queue, draft_link, silence
from services.router import fleet as fleet_module
from services.router import server as router_server
from services.router.chunk_queue import ChunkQueue
from services.router.fleet import Fleet
from services.router.request import ModelLimits, check_generate, parse_generate
from services.router.server import InferenceServicer
from services.router.session import Session
from services.router.settings import RouterSettings
from services.router.tenants import Tenants
from services.router.tokenizer import TextTokenizer
from services.router.usage import UsageMeter
from shared.engine.tokenizer_fingerprint import vocabulary_fingerprint
from shared.policy.gamma import Drafting, GammaController
from shared.policy.step_costs import StepCosts
from shared.rpc import edge
from shared.rpc.channel import connect
from shared.rpc.errors import Internal
from shared.rpc.options import CHANNEL_OPTIONS, MAX_MESSAGE_BYTES
from shared.rpc.server import RpcServer
from shared.sampling.params import SamplingParams
from shared.settings import StartupError
from shared.telemetry.metrics import RouterMetrics
from shared.telemetry.tracing import configure
from tests.support.fake_workers import (
    STEP_SECONDS,
    Answer,
    FakeDrafter,
    FakeTarget,
    Fault,
    draft_tokens,
    next_token,
    plain_output,
)
from tests.support.models import byte_tokenizer
from tests.support.usage import check_usage

TOKENIZER = byte_tokenizer()
FINGERPRINT = vocabulary_fingerprint(TOKENIZER.get_vocab())
PROMPT = [5, 17, 40, 8]
MAX_TOKENS = 24
GREEDY = plain_output(PROMPT, MAX_TOKENS)

pytestmark = pytest.mark.timeout(60)


@dataclass
class Output:
    """What came back of one request, by sequence."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    text: dict[int, str] = field(default_factory=dict)
    finish: dict[int, int] = field(default_factory=dict)
    draft_tokens: list[inference_pb2.DraftToken] = field(default_factory=list)
    usage: inference_pb2.Usage | None = None

    def take(self, chunk: inference_pb2.GenerateResponse) -> None:
        assert self.usage is None, "a chunk behind the usage"
        assert chunk.index not in self.finish, "a chunk behind the finish"
        self.tokens.setdefault(chunk.index, []).extend(chunk.token_ids)
        self.text[chunk.index] = self.text.get(chunk.index, "") + chunk.text
        self.draft_tokens.extend(chunk.draft_tokens)
        if chunk.finish_reason:
            self.finish[chunk.index] = chunk.finish_reason
        if chunk.HasField("usage"):
            self.usage = chunk.usage
            check_usage(chunk.usage, sum(map(len, self.tokens.values())), self.draft_tokens)


@dataclass
class Stack:
    """A router on fake workers, and a client of it."""

    targets: list[FakeTarget]
    drafter: FakeDrafter | None
    fleet: Fleet
    servicer: InferenceServicer
    server: RpcServer
    stub: Any
    address: str

    @property
    def target(self) -> FakeTarget:
        return self.targets[0]

    async def generate(self, request: inference_pb2.GenerateRequest | None = None, **call: Any) -> Output:
        return await read(self.stub.Generate(request or greedy(), **call))

    async def until_idle(self) -> None:
        """Every lane is given up, and every worker has heard of it."""
        workers = [*self.targets, *([self.drafter] if self.drafter is not None else [])]
        await until(lambda: self.servicer.admission.num_running == 0, "no request runs")
        await until(lambda: all(link.num_lanes == 0 for link in self.fleet.targets), "no lane is left")
        await until(lambda: all(worker.num_sequences == 0 for worker in workers), "no sequence is left")
        for worker in workers:
            assert worker.violations == []


async def read(call: Any) -> Output:
    output = Output()
    async for chunk in call:
        output.take(chunk)
    return output


async def until(condition: Callable[[], bool], what: str, seconds: float = 10.0) -> None:
    """Returns when the condition holds; fails if it does not within that time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"never: {what}"
        await asyncio.sleep(0.002)


def greedy(
    num_draft_tokens: int | None = None, max_tokens: int = MAX_TOKENS, **fields: Any
) -> inference_pb2.GenerateRequest:
    speculation = inference_pb2.Speculation(num_draft_tokens=num_draft_tokens)
    return inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=PROMPT),
        max_tokens=max_tokens,
        temperature=fields.pop("temperature", 0.0),
        speculation=fields.pop("speculation", speculation),
        **fields,
    )


@asynccontextmanager
async def stack(
    num_targets: int = 1, drafter: bool = True, api_keys: dict[str, str] | None = None, **settings: Any
) -> AsyncIterator[Stack]:
    targets = [FakeTarget(FINGERPRINT) for _ in range(num_targets)]
    draft = FakeDrafter(FINGERPRINT) if drafter else None
    workers = [*targets, *([draft] if draft is not None else [])]
    for worker in workers:
        await worker.start()
    telemetry = configure("outrider-router", None)
    options = RouterSettings.load(
        targets=[target.address for target in targets], tokenizer="unused", port=0, failover_seconds=10.0, **settings
    )
    fleet = Fleet(
        options.targets,
        draft.address if draft is not None else None,
        FINGERPRINT,
        options.max_num_draft_tokens,
        None,
    )
    servicer = InferenceServicer(
        options, TextTokenizer(TOKENIZER), fleet, Tenants(api_keys or {}, b"secret"), telemetry
    )
    server = RpcServer("127.0.0.1:0", telemetry)
    server.add("outrider.v1.Inference", inference_pb2_grpc.add_InferenceServicer_to_server, servicer)
    await server.start()
    fleet.start()
    try:
        await until(lambda: all(link.connected for link in fleet.targets), "targets connected")
        await until(lambda: all(target.streams for target in targets), "streams open")
        if fleet.draft is not None:
            link = fleet.draft
            await until(lambda: link.connected, "drafter connected")
        async with connect(server.address) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            yield Stack(targets, draft, fleet, servicer, server, stub, server.address)
    finally:
        await server.stop()
        await asyncio.wait_for(fleet.close(), 5)
        for worker in workers:
            await worker.stop()


@pytest.fixture
def quick_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_link, "_LEAST_PATIENCE_SECONDS", 0.05)
    monkeypatch.setattr(draft_link, "_SILENCE_SECONDS", 0.2)


def expected_rounds(num_draft_tokens: int, max_tokens: int) -> list[tuple[int, int]]:
    """(drafted, accepted) of each round, straight from the two functions."""
    tokens, rounds = [*PROMPT, next_token(PROMPT)], []
    while (left := max_tokens - (len(tokens) - len(PROMPT))) > 0:
        drafted = draft_tokens(tokens, min(num_draft_tokens, left - 1))
        accepted = 0
        while accepted < len(drafted) and drafted[accepted] == next_token([*tokens, *drafted[:accepted]]):
            accepted += 1
        tokens += drafted[:accepted]
        tokens.append(next_token(tokens))
        if drafted:
            rounds.append((len(drafted), accepted))
    return rounds


# Output


@pytest.mark.parametrize("num_draft_tokens", [0, 1, 3, 8, None])
async def test_greedy_output_is_the_targets_own(num_draft_tokens: int | None) -> None:
    async with stack() as s:
        output = await s.generate(greedy(num_draft_tokens))
        assert output.tokens == {0: GREEDY}
        assert output.text == {0: TOKENIZER.decode(GREEDY)}
        assert output.finish == {0: inference_pb2.FINISH_REASON_LENGTH}
        assert output.usage is not None
        assert (output.usage.rounds > 0) == (num_draft_tokens != 0)
        await s.until_idle()


async def test_without_a_drafter_and_with_speculation_off() -> None:
    async with stack(drafter=False) as s:
        assert (await s.generate(greedy(4))).tokens == {0: GREEDY}
        assert (await s.stub.GetModelInfo(inference_pb2.GetModelInfoRequest())).draft_model == ""
    async with stack() as s:
        output = await s.generate(greedy(speculation=inference_pb2.Speculation(enabled=False)))
        assert output.tokens == {0: GREEDY}
        assert s.drafter is not None
        assert s.drafter.num_asked == 0


async def test_sequences_that_never_draft_do_not_tell_how_long_those_that_do_become() -> None:
    async with stack() as s:
        controller = s.fleet.gamma(s.fleet.targets[0])
        assert controller is not None
        left: list[int | None] = []
        leave = controller.leave

        def noting(sequence: Drafting, num_output_tokens: int | None) -> None:
            left.append(num_output_tokens)
            leave(sequence, num_output_tokens)

        controller.leave = noting  # type: ignore[method-assign]
        await s.generate(greedy(speculation=inference_pb2.Speculation(enabled=False)))
        await s.generate(greedy(0))
        await s.generate(greedy(2))
        assert left == [MAX_TOKENS]


@pytest.mark.parametrize("num_draft_tokens", [1, 3, 8])
async def test_usage_counts_what_was_drafted_and_kept(num_draft_tokens: int) -> None:
    rounds = expected_rounds(num_draft_tokens, MAX_TOKENS)
    assert len({accepted for _, accepted in rounds}) > 1, "a test where some are kept and some are not"
    async with stack() as s:
        usage = (await s.generate(greedy(num_draft_tokens))).usage
    assert usage is not None
    assert usage.prompt_tokens == len(PROMPT)
    assert usage.output_tokens == MAX_TOKENS
    assert usage.rounds == len(rounds)
    assert usage.draft_tokens == sum(drafted for drafted, _ in rounds)
    assert usage.accepted_tokens == sum(accepted for _, accepted in rounds)
    assert [(entry.drafted, entry.accepted) for entry in usage.acceptance_by_position] == [
        (sum(drafted > i for drafted, _ in rounds), sum(accepted > i for _, accepted in rounds))
        for i in range(max(drafted for drafted, _ in rounds))
    ]
    assert 0 < usage.time_to_first_token_seconds <= usage.total_seconds


async def test_origins_of_tokens_tell_the_output_and_the_rounds() -> None:
    rounds = expected_rounds(3, MAX_TOKENS)
    async with stack() as s:
        output = await s.generate(greedy(3, include_draft_tokens=True))
    shown = output.draft_tokens
    counts = {origin: sum(each.origin == origin for each in shown) for origin in inference_pb2.TokenOrigin.values()}
    assert [each.token_id for each in shown if each.origin != inference_pb2.TOKEN_ORIGIN_REJECTED] == GREEDY
    assert counts[inference_pb2.TOKEN_ORIGIN_ACCEPTED] == sum(accepted for _, accepted in rounds)
    assert counts[inference_pb2.TOKEN_ORIGIN_REJECTED] == sum(drafted - accepted for drafted, accepted in rounds)
    assert counts[inference_pb2.TOKEN_ORIGIN_BONUS] == sum(drafted == accepted for drafted, accepted in rounds)
    assert counts[inference_pb2.TOKEN_ORIGIN_RECOVERED] == sum(drafted > accepted for drafted, accepted in rounds)
    assert all(each.text == TOKENIZER.decode([each.token_id]) for each in shown)


async def test_three_sequences_are_forks_of_one_prefill() -> None:
    async with stack() as s:
        output = await s.generate(greedy(3, temperature=1.0, seed=9, n=3))
        assert output.tokens == {index: plain_output(PROMPT, MAX_TOKENS, 10 + index) for index in range(3)}
        assert len(s.target.prefills) == 1
        assert output.usage is not None
        assert output.usage.output_tokens == 3 * MAX_TOKENS
        await s.until_idle()


@pytest.mark.parametrize("num_draft_tokens", [0, 3])
async def test_stop_token_and_stop_string_end_a_sequence(num_draft_tokens: int) -> None:
    stop_id = GREEDY[10]
    end = GREEDY.index(stop_id) + 1
    text = str(TOKENIZER.decode(GREEDY))
    stop = text[7:9]
    async with stack() as s:
        output = await s.generate(greedy(num_draft_tokens, stop_token_ids=[stop_id]))
        assert output.tokens == {0: GREEDY[:end]}
        assert output.text == {0: TOKENIZER.decode(GREEDY[: end - 1])}
        assert output.finish == {0: inference_pb2.FINISH_REASON_STOP}
        output = await s.generate(greedy(num_draft_tokens, stop=[stop]))
        assert output.text == {0: text[: text.index(stop)]}
        assert output.tokens == {0: GREEDY[: text.index(stop) + 2]}
        assert output.finish == {0: inference_pb2.FINISH_REASON_STOP}
        await s.until_idle()


@pytest.mark.parametrize("cut", range(1, 12))
async def test_what_a_stop_string_cuts_off_is_not_counted(cut: int) -> None:
    """Each request ends in another place of the drafts that were accepted; `check_usage` holds its usage to it."""
    text = str(TOKENIZER.decode(GREEDY))
    async with stack() as s:
        output = await s.generate(greedy(8, stop=[text[cut : cut + 2]], include_draft_tokens=True))
        end = text.index(text[cut : cut + 2]) + 2
        assert output.tokens == {0: GREEDY[:end]}
        shown = [each.token_id for each in output.draft_tokens if each.origin != inference_pb2.TOKEN_ORIGIN_REJECTED]
        assert shown == GREEDY[:end]
        await s.until_idle()


# Target workers that fail


@pytest.mark.parametrize("num_draft_tokens", [0, 3, None])
@pytest.mark.parametrize("fault", list(Fault))
async def test_a_fault_in_any_step_costs_no_token(fault: Fault, num_draft_tokens: int | None) -> None:
    async with stack() as s:
        num_hit = 0
        for step in range(MAX_TOKENS):
            await until(lambda: s.fleet.usable, "worker connected")
            first = s.target.num_steps
            s.target.faults = {first + step: fault}
            output = await s.generate(greedy(num_draft_tokens), timeout=20)
            assert output.tokens == {0: GREEDY}, f"{fault} in step {step}"
            num_hit += not s.target.faults
            if s.target.faults:
                break
        assert num_hit >= 6
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
        for _ in range(3):
            assert (await s.generate(greedy(3))).tokens == {0: GREEDY}
        assert len(broken.prefills) == num_prefills + 3, "back: idle as it is, and the first, it gets all"
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


# Target workers that hang


@pytest.fixture
def quick_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits of silence a hundredth of what they are."""
    monkeypatch.setattr(fleet_module, "_WATCH_SECONDS", 0.005)
    for name in ("_OVERDUE_SECONDS", "_HUNG_SECONDS", "_SOLE_HUNG_SECONDS"):
        monkeypatch.setattr(silence, name, getattr(silence, name) / 100)
    for name in ("_OVERDUE_STEPS", "_HUNG_STEPS", "_SOLE_HUNG_STEPS"):
        monkeypatch.setattr(silence, name, 0.0)


@pytest.mark.usefixtures("quick_watch")
@pytest.mark.parametrize("num_draft_tokens", [0, 3])
async def test_streams_are_moved_off_a_worker_that_hangs(num_draft_tokens: int) -> None:
    async with stack(num_targets=2) as s:
        hanging, other = s.targets
        hanging.gate.clear()
        other.gate.clear()
        running = [
            asyncio.create_task(s.generate(greedy(num_draft_tokens, temperature=1.0, seed=seed))) for seed in range(8)
        ]
        await until(lambda: all(target.num_sequences == 4 for target in s.targets), "four on each")
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
        hanging, other = s.targets
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


# Drafters that fail


@pytest.mark.parametrize("answer", [each for each in Answer if each is not Answer.PROPOSE])
@pytest.mark.parametrize("num_draft_tokens", [3, None])
@pytest.mark.usefixtures("quick_hang")
async def test_a_drafter_that_fails_costs_no_token(answer: Answer, num_draft_tokens: int | None) -> None:
    async with stack() as s:
        assert s.drafter is not None
        for ask in range(4):
            s.drafter.answers = {s.drafter.num_asked + ask: answer}
            assert (await s.generate(greedy(num_draft_tokens), timeout=20)).tokens == {0: GREEDY}, f"ask {ask}"
        s.drafter.answers, s.drafter.answer = {}, answer
        assert (await s.generate(greedy(num_draft_tokens, n=2), timeout=20)).tokens == {0: GREEDY, 1: GREEDY}
        await s.until_idle()


async def test_a_drafter_that_dies_while_asked_is_not_waited_for() -> None:
    async with stack() as s:
        assert s.drafter is not None
        s.drafter.answer = Answer.ABORT
        assert (await s.generate(greedy(3), timeout=draft_link._SILENCE_SECONDS * 0.8)).tokens == {0: GREEDY}


def make_scout_due(s: Stack) -> GammaController:
    """Drafting would pay if it were good, which it was not."""
    controller = s.fleet.gamma(s.fleet.targets[0])
    assert controller is not None
    controller._draft = StepCosts([(1, 0.1 * STEP_SECONDS)])
    for _ in range(100):
        controller.acceptance.observe(8, 0)
    controller._last_round -= 60
    return controller


async def test_a_scout_that_is_due_goes_while_its_sequence_decodes_plainly() -> None:
    async with stack() as s:
        assert s.drafter is not None
        acceptance = make_scout_due(s).acceptance
        rate = acceptance.rate
        output = await s.generate(greedy(max_tokens=40))
        assert output.tokens == {0: plain_output(PROMPT, 40)}
        assert output.usage is not None
        assert output.usage.rounds == 0
        assert 1 <= s.drafter.num_asked <= 5, "some proposals, to see whether it pays by now"
        assert acceptance.rate > rate, "they were good"
        await s.until_idle()


async def test_a_scout_drafts_in_rounds_where_the_target_draws_by_other_noise() -> None:
    async with stack() as s:
        make_scout_due(s)
        usage = (await s.generate(greedy(temperature=1.0))).usage
        assert usage is not None
        assert 1 <= usage.rounds <= 8


@pytest.mark.parametrize("answer", list(Answer))
@pytest.mark.usefixtures("quick_hang")
async def test_a_drafter_that_fails_a_scout_costs_nothing(answer: Answer) -> None:
    async with stack() as s:
        assert s.drafter is not None
        s.drafter.answer = answer
        make_scout_due(s)
        output = await s.generate(greedy(n=2), timeout=20)
        assert output.tokens == {0: GREEDY, 1: GREEDY}
        assert output.usage is not None
        assert output.usage.rounds == 0
        assert s.drafter.num_asked > 0
        await s.until_idle()


async def test_a_drafter_that_forgot_is_told_everything_again() -> None:
    async with stack() as s:
        assert s.drafter is not None
        s.drafter.answers = {2: Answer.UNKNOWN}
        usage = (await s.generate(greedy(3))).usage
        assert usage is not None
        assert usage.rounds == len(expected_rounds(3, MAX_TOKENS)), "no round was lost"


async def test_an_answer_that_comes_late_does_not_pass_for_the_next() -> None:
    async with stack() as s:
        assert s.drafter is not None
        s.drafter.answer = Answer.LATE
        usage = (await s.generate(greedy(3))).usage
        assert usage is not None
        assert usage.accepted_tokens == sum(accepted for _, accepted in expected_rounds(3, MAX_TOKENS))


@pytest.mark.usefixtures("quick_hang")
async def test_a_drafter_that_hangs_is_waited_for_once() -> None:
    async with stack() as s:
        assert s.drafter is not None
        s.drafter.answer = Answer.HANG
        assert s.fleet.draft is not None
        epoch = s.fleet.draft.epoch
        assert (await s.generate(greedy(3, max_tokens=100))).tokens == {0: plain_output(PROMPT, 100)}
        assert s.drafter.num_asked == 1
        link = s.fleet.draft
        await until(lambda: link.epoch > epoch and link.connected, "connected anew")
        s.drafter.answer = Answer.PROPOSE
        usage = (await s.generate(greedy(3))).usage
        assert usage is not None
        assert usage.rounds > 0
        await s.until_idle()


@pytest.mark.usefixtures("quick_hang")
async def test_a_sequence_that_the_drafter_keeps_waiting_does_not_cost_the_others_theirs() -> None:
    async with stack() as s:
        assert s.drafter is not None
        assert s.fleet.draft is not None
        epoch = s.fleet.draft.epoch
        s.drafter.answers = {0: Answer.HANG}
        outputs = await asyncio.gather(*(s.generate(greedy(1, max_tokens=400)) for _ in range(3)))
        assert all(output.tokens == {0: plain_output(PROMPT, 400)} for output in outputs)
        assert s.fleet.draft.epoch == epoch
        assert sorted(output.usage.rounds > 0 for output in outputs if output.usage) == [False, True, True]


async def test_a_late_proposal_costs_neither_the_link_nor_the_sequence_its_drafter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(draft_link, "_LEAST_PATIENCE_SECONDS", 0.05)
    monkeypatch.setattr(draft_link, "_FIRST_PAUSE_SECONDS", 0.01)
    async with stack() as s:
        assert s.drafter is not None
        assert s.fleet.draft is not None
        link, drafter, epoch = s.fleet.draft, s.drafter, s.fleet.draft.epoch
        drafter.gate.clear()
        output = Output()
        call = s.stub.Generate(greedy(3, max_tokens=400))
        reading = asyncio.create_task(read_into(output, call))
        await until(lambda: len(output.tokens.get(0, ())) > 20, "decoded plainly")
        assert drafter.num_asked == 1, "not asked again while it owes an answer"
        s.target.gate.clear()
        drafter.gate.set()
        await until(lambda: not link._asks, "late answer come")
        s.target.gate.set()
        await reading
        assert output.tokens == {0: plain_output(PROMPT, 400)}
        assert output.usage is not None
        assert output.usage.rounds > 10
        assert drafter.num_begun == 1, "told what was new only"
        assert link.epoch == epoch
        await s.until_idle()


async def read_into(output: Output, call: Any) -> None:
    async for chunk in call:
        output.take(chunk)


@pytest.mark.parametrize("answer", [Answer.EXHAUSTED, Answer.CONTEXT_EXCEEDED])
async def test_a_drafter_without_room_is_not_told_everything_again_and_again(
    answer: Answer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_link, "_FIRST_PAUSE_SECONDS", 60.0)
    async with stack() as s:
        assert s.drafter is not None
        s.drafter.answers = {3: answer}
        assert (await s.generate(greedy(3, max_tokens=200))).tokens == {0: plain_output(PROMPT, 200)}
        assert s.drafter.num_asked == 4
        assert s.drafter.num_begun == 1
        await s.until_idle()


async def test_room_that_was_not_there_is_asked_for_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_link, "_FIRST_PAUSE_SECONDS", 0.0)
    async with stack() as s:
        assert s.drafter is not None
        s.drafter.answers = {0: Answer.EXHAUSTED}
        output = await s.generate(greedy(3, max_tokens=200))
        assert output.usage is not None
        assert output.usage.rounds > 10
        assert s.drafter.num_begun == 2


async def test_a_drafter_of_shorter_context_is_not_asked_beyond_it() -> None:
    async with stack() as s:
        assert s.drafter is not None
        assert s.fleet.draft is not None
        link = s.fleet.draft
        await s.drafter.stop()
        await until(lambda: not link.connected, "loss noticed")
        s.drafter.info.max_context = 60
        await s.drafter.start()
        await until(lambda: link.connected, "connected again")
        output = await s.generate(greedy(3, max_tokens=200))
        assert output.tokens == {0: plain_output(PROMPT, 200)}
        assert output.usage is not None
        assert output.usage.rounds > 5
        assert s.drafter.num_begun == 1
        long = greedy(3)
        long.token_ids.ids[:] = range(1, 61)
        assert (await s.generate(long)).tokens == {0: plain_output(range(1, 61), MAX_TOKENS)}
        assert s.drafter.num_begun == 1, "not even told of it"
        await s.until_idle()


async def test_the_drafter_is_used_again_when_it_is_back() -> None:
    async with stack() as s:
        assert s.drafter is not None
        assert s.fleet.draft is not None
        link = s.fleet.draft
        await s.drafter.stop()
        await until(lambda: not link.connected, "loss noticed")
        output = await s.generate(greedy(3))
        assert output.tokens == {0: GREEDY}
        assert output.usage is not None
        assert output.usage.rounds == 0
        await s.drafter.start()
        await until(lambda: link.connected, "connected again")
        usage = (await s.generate(greedy(3))).usage
        assert usage is not None
        assert usage.rounds == len(expected_rounds(3, MAX_TOKENS))


# Clients that leave


@pytest.mark.parametrize("num_draft_tokens", [0, 3, None])
@pytest.mark.parametrize("how", ["cancel", "disconnect", "deadline"])
async def test_nothing_is_left_when_a_client_leaves(how: str, num_draft_tokens: int | None) -> None:
    async with stack() as s:
        for step in range(4):
            hold_at = s.target.num_steps + step
            request = greedy(num_draft_tokens, max_tokens=400, n=2)
            s.target.gate.set()
            async with connect(s.address) as channel:
                stub = inference_pb2_grpc.InferenceStub(channel)
                call = stub.Generate(request, timeout=0.3 if how == "deadline" else None)
                reading = asyncio.create_task(read_all(call))
                await until(lambda hold_at=hold_at: s.target.num_steps >= hold_at and s.target.num_sequences > 0, "on")  # type: ignore[misc]
                s.target.gate.clear()
                if how == "cancel":
                    call.cancel()
                elif how == "disconnect":
                    await channel.close()
                code = await reading
            assert code is (grpc.StatusCode.DEADLINE_EXCEEDED if how == "deadline" else grpc.StatusCode.CANCELLED)
            await until(lambda: s.servicer.admission.num_running == 0, "no request runs")
            s.target.gate.set()
            await s.until_idle()
        assert (await s.generate(greedy(num_draft_tokens))).tokens == {0: GREEDY}


async def read_all(call: Any) -> grpc.StatusCode:
    """Reads to the end, which is not a good one; its status."""
    try:
        async for _ in call:
            pass
    except (asyncio.CancelledError, grpc.aio.AioRpcError):
        pass
    code: grpc.StatusCode = await call.code()
    return code


async def test_a_client_that_leaves_while_the_drafter_drafts_leaves_nothing() -> None:
    async with stack() as s:
        assert s.drafter is not None
        s.drafter.answer = Answer.HANG
        call = s.stub.Generate(greedy(3))
        reading = asyncio.create_task(read_all(call))
        drafter = s.drafter
        await until(lambda: drafter.num_asked > 0, "drafter asked")
        call.cancel()
        assert await reading is grpc.StatusCode.CANCELLED
        await s.until_idle()


@pytest.mark.parametrize("num_times", [1, 3, 5])
async def test_a_session_cancelled_before_its_first_step_leaves_nothing(num_times: int) -> None:
    async with stack() as s:
        s.target.gate.clear()
        tasks: list[asyncio.Task[None]] = []
        original = s.fleet.place

        async def place_and_cancel(*args: Any) -> Any:
            placed = await original(*args)
            # In the very turn of the loop in which the sequences' tasks are made.
            cancel(num_times)
            return placed

        def cancel(num_left: int) -> None:
            # By the deadline and by the client, both at once: in every turn of the loop that it unwinds in.
            tasks[0].cancel()
            if num_left > 1:
                asyncio.get_running_loop().call_soon(cancel, num_left - 1)

        s.fleet.place = place_and_cancel  # type: ignore[assignment, method-assign]
        session = _session(s)

        async def write(_: inference_pb2.GenerateResponse) -> None:
            raise AssertionError("nothing can have come")

        tasks.append(asyncio.create_task(session.run(write, lambda: None)))
        with pytest.raises(asyncio.CancelledError):
            await tasks[0]
        assert s.fleet.targets[0].num_lanes == 0
        await s.until_idle()


def _session(s: Stack) -> Session:
    tokenizer, telemetry = TextTokenizer(TOKENIZER), configure("outrider-router", None)
    options = parse_generate(greedy(3, n=2), tokenizer, ModelLimits(257, 512, frozenset({0})))
    usage = UsageMeter(RouterMetrics(telemetry.meter, "m"), "text_completion")
    return Session(options, s.fleet, tokenizer, usage, telemetry, b"", 1.0)


# Clients that do not read


@asynccontextmanager
async def unread(s: Stack, request: inference_pb2.GenerateRequest, num_bytes: int = 1024) -> AsyncIterator[Any]:
    """A call of a client that reads nothing yet, and for which no more than `num_bytes` are under way."""
    options = (*CHANNEL_OPTIONS, ("grpc.http2.lookahead_bytes", num_bytes), ("grpc.http2.bdp_probe", 0))
    async with grpc.aio.insecure_channel(s.address, options=options) as channel:
        call = inference_pb2_grpc.InferenceStub(channel).Generate(request)
        await until(lambda: bool(s.target.prefills), "prefill arrived")
        yield call
        call.cancel()


async def test_places_are_free_when_generation_ends_and_not_when_its_client_has_read_it() -> None:
    async with stack(max_running=1, max_waiting=0) as s, unread(s, greedy(3, max_tokens=400)) as call:
        await s.until_idle()
        assert (await s.generate()).tokens == {0: GREEDY}
        assert not call.done()
        # Late is not too late.
        assert (await read(call)).tokens == {0: plain_output(PROMPT, 400)}


async def test_a_client_that_falls_too_far_behind_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_queue, "_MAX_QUEUED_BYTES", 30_000)
    monkeypatch.setattr(edge, "_STATUS_SECONDS", 0.05)
    most: list[int] = []
    put = ChunkQueue.put

    def watched(self: ChunkQueue, chunk: inference_pb2.GenerateResponse) -> None:
        put(self, chunk)
        most.append(sum(chunk.ByteSize() for chunk in self._chunks))

    monkeypatch.setattr(ChunkQueue, "put", watched)
    async with stack() as s, unread(s, greedy(0, max_tokens=400, n=4)) as call:
        await s.until_idle()
        assert 100 < len(most) < 4 * 400, "not at once, and not at the end"
        assert max(most) <= 30_000
        await until(lambda: s.server._edge.num_active == 0, "the RPC has ended")
        with pytest.raises(grpc.aio.AioRpcError, match="too slow: more than 30000 bytes"):
            await read(call)
        assert await call.code() is grpc.StatusCode.ABORTED


async def test_a_client_that_reads_nothing_for_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_queue, "_WRITE_SECONDS", 0.5)
    monkeypatch.setattr(edge, "_STATUS_SECONDS", 0.05)
    held_up = asyncio.Event()
    put = ChunkQueue.put

    def watched(self: ChunkQueue, chunk: inference_pb2.GenerateResponse) -> None:
        put(self, chunk)
        if len(self._chunks) == 1000:
            # Generation is far from its end, and stays there.
            s.target.gate.clear()
            held_up.set()

    monkeypatch.setattr(ChunkQueue, "put", watched)
    async with stack(max_running=1) as s, unread(s, greedy(0, max_tokens=400, n=8)) as call:
        await held_up.wait()
        await until(lambda: s.servicer.admission.num_running == 0, "its place is free while it would be going on")
        s.target.gate.set()
        await s.until_idle()
        assert s.target.num_steps < 400
        await until(lambda: s.server._edge.num_active == 0, "the RPC has ended")
        with pytest.raises(grpc.aio.AioRpcError, match=r"read nothing for 0\.5 s"):
            await read(call)
        assert await call.code() is grpc.StatusCode.ABORTED


@pytest.mark.parametrize("num_bytes", [5, 1024])
async def test_a_client_that_does_not_even_read_the_first_chunk_is_told_why(
    num_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunk_queue, "_MAX_QUEUED_BYTES", 30_000)
    monkeypatch.setattr(edge, "_STATUS_SECONDS", 0.05)
    async with stack() as s, unread(s, greedy(0, max_tokens=400, n=4), num_bytes) as call:
        await s.until_idle()
        await until(lambda: s.server._edge.num_active == 0, "the RPC has ended")
        assert await read_all(call) is grpc.StatusCode.ABORTED


async def test_a_drain_does_not_wait_for_a_client_that_does_not_read() -> None:
    async with stack() as s, unread(s, greedy(0, max_tokens=400)) as call:
        await s.until_idle()
        await asyncio.wait_for(s.server.drain(s.servicer.admission.drain, 0.1), 10)
        assert s.server._edge.num_active == 0
        assert await read_all(call) is not grpc.StatusCode.OK


# Admission, authentication, drain


async def test_a_full_queue_is_resource_exhausted() -> None:
    async with stack(max_running=1, max_waiting=1) as s:
        s.target.gate.clear()
        first = asyncio.create_task(s.generate())
        await until(lambda: s.servicer.admission.num_running == 1, "first runs")
        second = asyncio.create_task(s.generate())
        await until(lambda: s.servicer.admission.num_waiting == 1, "second waits")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await s.generate()
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        s.target.gate.set()
        assert (await first).tokens == (await second).tokens == {0: GREEDY}
        await s.until_idle()


async def test_a_deadline_in_the_queue_leaves_nothing() -> None:
    async with stack(max_running=1) as s:
        s.target.gate.clear()
        first = asyncio.create_task(s.generate())
        await until(lambda: s.servicer.admission.num_running == 1, "first runs")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await s.generate(timeout=0.1)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: s.servicer.admission.num_waiting == 0, "place in line given up")
        s.target.gate.set()
        assert (await first).tokens == {0: GREEDY}
        await s.until_idle()


LONG_TEXT = "def main(): pass\n" * 300


def long_request(max_tokens: int = 4) -> inference_pb2.GenerateRequest:
    """One that is tokenized in a thread."""
    return inference_pb2.GenerateRequest(text=LONG_TEXT, max_tokens=max_tokens, temperature=0.0)


class HeldTokenizer(TextTokenizer):
    """Tokenizes nothing until told to, and knows how much it was asked for, and in which threads."""

    def __init__(self) -> None:
        super().__init__(TOKENIZER)
        self.go_on = threading.Event()
        self.threads: list[int] = []

    def encode(self, text: str) -> tuple[int, ...]:
        self.threads.append(threading.get_ident())
        assert self.go_on.wait(30)
        return super().encode(text[:100])


@asynccontextmanager
async def held_stack(**settings: Any) -> AsyncIterator[tuple[Stack, HeldTokenizer]]:
    async with stack(**settings) as s:
        tokenizer = HeldTokenizer()
        s.servicer._tokenizer = tokenizer
        try:
            yield s, tokenizer
        finally:
            tokenizer.go_on.set()


async def test_who_is_refused_was_not_tokenized_and_bad_input_is_named_all_the_same() -> None:
    async with held_stack(max_running=1, max_waiting=0) as (s, tokenizer):
        s.target.gate.clear()
        first = asyncio.create_task(s.generate())
        await until(lambda: s.servicer.admission.num_running == 1, "first runs")
        for request, code in (
            (long_request(), grpc.StatusCode.RESOURCE_EXHAUSTED),
            (inference_pb2.GenerateRequest(text="short"), grpc.StatusCode.RESOURCE_EXHAUSTED),
            (greedy(n=17), grpc.StatusCode.INVALID_ARGUMENT),
            (greedy(stop=[""]), grpc.StatusCode.INVALID_ARGUMENT),
            (inference_pb2.GenerateRequest(text="x" * (1 << 20) + "x"), grpc.StatusCode.INVALID_ARGUMENT),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await s.generate(request, timeout=20)
            assert caught.value.code() is code
        assert tokenizer.threads == []
        s.target.gate.set()
        assert (await first).tokens == {0: GREEDY}


async def test_a_request_takes_as_many_places_as_it_has_sequences() -> None:
    async with stack(max_running=4) as s:
        s.target.gate.clear()
        three = asyncio.create_task(s.generate(greedy(0, n=3)))
        await until(lambda: s.servicer.admission.num_running == 3, "three run")
        two = asyncio.create_task(s.generate(greedy(0, n=2)))
        await until(lambda: s.servicer.admission.num_waiting == 1, "two wait")
        # More than there are places for: it runs alone.
        sixteen = asyncio.create_task(s.generate(greedy(0, n=16)))
        await until(lambda: s.servicer.admission.num_waiting == 2, "sixteen wait behind them")
        assert s.target.num_sequences == 3
        s.target.gate.set()
        for running, n in ((three, 3), (two, 2), (sixteen, 16)):
            assert (await running).tokens == dict.fromkeys(range(n), GREEDY)
        await s.until_idle()


async def test_lines_are_the_tenants_however_many_connections_they_open() -> None:
    keys = {"key-a": "anna", "key-b": "bert"}
    salts = {name: Tenants(keys, b"secret").cache_salt(name) for name in keys.values()}
    async with stack(max_running=1, api_keys=keys) as s, AsyncExitStack() as channels:
        s.target.gate.clear()
        running: list[asyncio.Task[Output]] = []
        for number, key in enumerate(["key-a"] * 4 + ["key-b"]):
            channel = await channels.enter_async_context(connect(s.address))
            call = inference_pb2_grpc.InferenceStub(channel).Generate(
                greedy(), metadata=(("authorization", f"Bearer {key}"),)
            )
            running.append(asyncio.create_task(read(call)))
            await until(lambda number=number: s.servicer.admission.num_waiting == number, "in line")  # type: ignore[misc]
        s.target.gate.set()
        assert all(output.tokens == {0: GREEDY} for output in await asyncio.gather(*running))
        served = [prefill.cache_salt for prefill in s.target.prefills]
        assert served == [salts[name] for name in ("anna", "anna", "bert", "anna", "anna")]


async def test_tokenize_waits_in_a_line_of_its_own_and_not_without_end() -> None:
    request = inference_pb2.TokenizeRequest(text=LONG_TEXT)
    async with held_stack(max_waiting=1) as (s, tokenizer):
        calls = [asyncio.ensure_future(s.stub.Tokenize(request)) for _ in range(3)]
        done, others = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
        error = done.pop().exception()
        assert isinstance(error, grpc.aio.AioRpcError)
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert error.trailing_metadata()["grpc-status-details-bin"]
        # The one that waits costs no thread, and its deadline counts.
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await s.stub.Tokenize(inference_pb2.TokenizeRequest(text=LONG_TEXT), timeout=0.1)
        assert caught.value.code() in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.DEADLINE_EXCEEDED)
        await until(lambda: len(tokenizer.threads) == 1, "one is tokenized")
        # Generate is not held up by it: there is a thread left.
        generated = asyncio.create_task(s.generate(long_request()))
        await until(lambda: len(tokenizer.threads) == 2, "a prompt is tokenized beside it")
        assert threading.get_ident() not in tokenizer.threads
        # Short texts are not worth a line.
        tokenizer.go_on.set()
        assert len((await s.stub.Tokenize(inference_pb2.TokenizeRequest(text="x"))).token_ids) == 1
        for call in others:
            assert list((await call).token_ids) == list(TextTokenizer(TOKENIZER).encode(LONG_TEXT[:100]))
        assert len((await generated).tokens[0]) == 4
        await s.until_idle()


async def test_a_client_that_leaves_while_its_prompt_is_tokenized_keeps_its_place_until_the_thread_is_free() -> None:
    async with held_stack(max_running=1) as (s, tokenizer):
        call = s.stub.Generate(long_request())
        await until(lambda: len(tokenizer.threads) == 1, "it is tokenized")
        call.cancel()
        other = asyncio.create_task(s.generate())
        await until(lambda: s.servicer.admission.num_waiting == 1, "another waits")
        await asyncio.sleep(0.05)
        assert s.servicer.admission.num_running == 1
        assert s.target.prefills == []
        tokenizer.go_on.set()
        assert (await other).tokens == {0: GREEDY}
        await s.until_idle()


async def test_large_requests_are_checked_off_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []

    def noting(*args: Any) -> Any:
        threads.append(threading.get_ident())
        return check_generate(*args)

    monkeypatch.setattr(router_server, "check_generate", noting)
    unknown = b"\x0a\x06\x0a\x01u\x98\x06\x01"
    chat = unknown * 4096
    many = inference_pb2.GenerateRequest.FromString(b"\x1a\x80\x80\x02" + chat)
    async with stack() as s:
        for request, error in (
            (many, "chat.messages[0].field number is 99"),
            (
                inference_pb2.GenerateRequest(chat={"messages": [{"role": "u"}] * 4097}),
                "chat.messages is '4097 messages'",
            ),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await s.generate(request)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert (caught.value.details() or "").startswith(error)
        assert len(threads) == 2
        assert threading.get_ident() not in threads
        assert (await s.generate()).tokens == {0: GREEDY}
        assert threads[-1] == threading.get_ident()


async def test_only_a_known_key_is_served_and_its_salt_goes_along() -> None:
    async with stack(api_keys={"key-a": "anna"}) as s:
        for metadata in ((), (("authorization", "Bearer anna"),), (("authorization", "Bearer key-b"),)):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await s.generate(metadata=metadata)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert s.target.prefills == []
        assert (await s.generate(metadata=(("authorization", "Bearer key-a"),))).tokens == {0: GREEDY}
        assert s.target.prefills[0].cache_salt == Tenants({"key-a": "anna"}, b"secret").cache_salt("anna")


async def test_bad_input_touches_no_worker() -> None:
    async with stack() as s:
        for request in (greedy(17), greedy(max_tokens=1000), greedy(temperature=-1.0), greedy(n=0)):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await s.generate(request)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert s.target.prefills == []


async def test_a_drain_finishes_what_runs() -> None:
    async with stack() as s:
        s.target.gate.clear()
        running = asyncio.create_task(s.generate(greedy(3)))
        await until(lambda: s.target.num_sequences == 1, "prefill arrived")
        drain = asyncio.create_task(s.server.drain(s.servicer.admission.drain, 20))
        await until(lambda: s.servicer.admission._draining, "drain begun")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await s.generate()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert not running.done()
        s.target.gate.set()
        assert (await running).tokens == {0: GREEDY}
        await drain


async def test_a_drain_that_takes_too_long_cancels_and_releases() -> None:
    async with stack() as s:
        s.target.gate.clear()
        running = asyncio.create_task(s.generate(greedy(3)))
        await until(lambda: s.target.num_sequences == 1, "prefill arrived")
        await s.server.drain(s.servicer.admission.drain, 0.05)
        with pytest.raises(grpc.aio.AioRpcError):
            await running
        s.target.gate.set()
        await s.until_idle()


async def test_sigterm_ends_the_process_when_what_runs_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    TOKENIZER.save_pretrained(tmp_path)
    monkeypatch.setattr(router_server, "configure_logging", lambda *_: None)
    target = FakeTarget(FINGERPRINT)
    await target.start()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    settings = RouterSettings.load(targets=[target.address], tokenizer=str(tmp_path), port=port, api_keys="anna=key-a")
    serving = asyncio.create_task(router_server.serve(settings))
    try:
        async with connect(f"127.0.0.1:{port}") as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            await until(lambda: bool(target.streams), "worker connected")
            target.gate.clear()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await read(stub.Generate(greedy(), metadata=(("authorization", "Bearer anna"),)))
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
            running = asyncio.create_task(read(stub.Generate(greedy(), metadata=(("authorization", "Bearer key-a"),))))
            await until(lambda: target.num_sequences == 1, "prefill arrived")
            os.kill(os.getpid(), signal.SIGTERM)
            with pytest.raises(grpc.aio.AioRpcError, match="draining"):
                await ask_for_ever(stub)
            assert not running.done()
            target.gate.set()
            assert (await running).tokens == {0: GREEDY}
            await asyncio.wait_for(serving, 10)
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        await target.stop()


async def ask_for_ever(stub: Any) -> None:
    while True:
        await stub.GetModelInfo(inference_pb2.GetModelInfoRequest(), metadata=(("authorization", "Bearer key-a"),))


# Workers that do not fit together


@pytest.mark.parametrize("which", ["target", "draft", "fingerprint"])
async def test_workers_that_do_not_fit_are_reported(which: str) -> None:
    workers: list[FakeTarget | FakeDrafter] = [
        FakeTarget(FINGERPRINT),
        FakeTarget(FINGERPRINT),
        FakeDrafter(FINGERPRINT),
    ]
    if which == "target":
        workers[0].info.tokenizer_fingerprint = "other"
    elif which == "draft":
        workers[2].info.tokenizer_fingerprint = "other"
    else:
        workers[1].info.fingerprint = "other"
    for worker in workers:
        await worker.start()
    fleet = Fleet([workers[0].address, workers[1].address], workers[2].address, FINGERPRINT, 8, None)
    fleet.start()
    try:
        expected = "one model" if which == "fingerprint" else f"the {which} worker's model"
        with pytest.raises(StartupError, match=expected):
            await asyncio.wait_for(fleet.failed, 10)
    finally:
        await asyncio.wait_for(fleet.close(), 5)
        for worker in workers:
            await worker.stop()
