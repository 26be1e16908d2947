"""What the workers' servicers take in and refuse, and how: without a model."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from outrider.v1 import draft_pb2, target_pb2, worker_pb2

from services.draft.server import DraftServicer
from services.target.gathering import Gathering
from services.target.neighbours import Neighbours
from services.target.server import TargetServicer
from shared.copying.suffix_source import SuffixSource
from shared.engine.block_pool import BlockPool
from shared.engine.engine import Gain, StepOutcome
from shared.engine.host_tier import HostTier
from shared.engine.loop import EngineLoop
from shared.engine.scheduler import Scheduler
from shared.engine.sequence import Sequence
from shared.sampling.params import SamplingParams
from shared.sampling.sampled import Candidates, SampledTokens, TokenLogprobs
from shared.telemetry.tracing import configure
from shared.worker import bundles
from shared.worker.bundles import BUNDLE_BYTES
from shared.worker.messages import params_to_proto
from shared.worker.stream import RouterStream
from tests.support.machine import SimulatedMover

MAX_CONTEXT = 32


class Sent(RouterStream[Any]):
    """A stream that keeps what is sent over it."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[Any] = []

    def send(self, response: Any) -> None:
        self.sent.append(response)

    def send_sign_of_life(self, response: Any) -> None:
        self.sent.append(response)


def with_engine(servicer: Any, blocks: BlockPool | None = None) -> Any:
    blocks = blocks or BlockPool(64)
    scheduler = Scheduler(blocks, block_size=4, max_batch_tokens=20, max_sequences=6)
    engine = SimpleNamespace(max_context=MAX_CONTEXT, fingerprint="f", scheduler=scheduler, blocks=blocks)
    servicer._engine_loop = SimpleNamespace(engine=engine)
    return servicer


def sequences(servicer: Any) -> list[Sequence]:
    """What the engine has, forks that wait for their first included."""
    return [each for first in servicer.engine.scheduler.sequences() for each in (first, *first.forks)]


def step(servicer: Any) -> None:
    """One step of an engine whose model always says 1."""
    scheduler = servicer.engine.scheduler
    plan = scheduler.schedule()
    if plan is None:
        return
    prefills = plan.prefills
    sampling = [item.sequence for item in plan.scheduled if item.num_rows]
    drafted = [len(each.proposal) for each in sampling]
    gained = scheduler.complete(plan, [SampledTokens((1,)) for _ in sampling])
    gains = [Gain(sequence, sampled, count) for (sequence, sampled), count in zip(gained, drafted, strict=True)]
    servicer._on_outcome(StepOutcome(gains, [], plan.num_tokens, len(plan.scheduled), 0, 0.01, prefills))


def target_request(*operations: target_pb2.Prefill | target_pb2.Verify | int) -> target_pb2.TargetRequest:
    """A message of these operations in this order; a number is the id of a sequence to release."""
    request = target_pb2.TargetRequest()
    for operation in operations:
        if isinstance(operation, target_pb2.Prefill):
            request.operations.add(prefill=operation)
        elif isinstance(operation, target_pb2.Verify):
            request.operations.add(verify=operation)
        else:
            request.operations.add(release=operation)
    return request


def draft_request(*operations: draft_pb2.Propose | int) -> draft_pb2.DraftRequest:
    request = draft_pb2.DraftRequest()
    for operation in operations:
        if isinstance(operation, draft_pb2.Propose):
            request.operations.add(propose=operation)
        else:
            request.operations.add(release=operation)
    return request


def assert_empty(servicer: Any, stream: Sent) -> None:
    assert stream.lanes == servicer._lanes == {}
    assert sequences(servicer) == []
    assert servicer.engine.blocks.counts().owned == 0


def prefill(max_tokens: int = 8, first_id: int = 4) -> target_pb2.Prefill:
    return target_pb2.Prefill(
        sequence_id=first_id,
        token_ids=[1, 2, 3],
        num_prompt_tokens=3,
        params=params_to_proto(SamplingParams(max_tokens=max_tokens)),
        forks=[target_pb2.Fork(sequence_id=first_id + i, sequence_index=i) for i in (1, 2)],
        num_steps=1,
    )


async def test_a_refused_prefill_answers_for_every_fork() -> None:
    servicer, stream = with_engine(TargetServicer(configure("t", None), "x")), Sent()
    servicer._on_request(stream, target_request(prefill(max_tokens=MAX_CONTEXT)))
    servicer._draining = True
    servicer._on_request(stream, target_request(prefill()))
    too_large, unknown = stream.sent
    assert [(each.sequence_id, each.status) for each in too_large.results] == [
        (id, target_pb2.STEP_STATUS_TOO_LARGE) for id in (4, 5, 6)
    ]
    assert [(each.sequence_id, each.status) for each in unknown.results] == [
        (id, target_pb2.STEP_STATUS_UNKNOWN_SEQUENCE) for id in (4, 5, 6)
    ]
    assert stream.lanes == {}


async def test_a_prefill_worker_draws_first_tokens_and_no_more() -> None:
    servicer = with_engine(TargetServicer(configure("t", None), "x", worker_pb2.ROLE_PREFILL))
    stream = Sent()
    greedy_for_more = prefill()
    greedy_for_more.num_steps = 2
    servicer._on_request(stream, target_request(greedy_for_more))
    refused = [result for response in stream.sent for result in response.results]
    assert [(each.sequence_id, each.status) for each in refused] == [
        (sequence_id, target_pb2.STEP_STATUS_WRONG_ROLE) for sequence_id in (4, 5, 6)
    ]
    assert not stream.lanes
    stream.sent.clear()
    servicer._on_request(stream, target_request(prefill()))
    step(servicer)
    step(servicer)
    assert sum(len(response.results) for response in stream.sent) == 3
    stream.sent.clear()
    servicer._on_request(stream, target_request(target_pb2.Verify(sequence_id=4, position=4, num_steps=1)))
    [refusal] = [result for response in stream.sent for result in response.results]
    assert (refusal.sequence_id, refusal.status) == (4, target_pb2.STEP_STATUS_WRONG_ROLE)
    assert set(stream.lanes) == {5, 6}


async def test_a_malformed_proposal_is_not_verified_and_costs_nobody_a_step() -> None:
    servicer, stream = with_engine(TargetServicer(configure("t", None), "x")), Sent()
    servicer._on_request(stream, target_request(prefill()))
    sequence = sequences(servicer)[0]
    sequence.num_steps = 0
    # Rejection sampling, and no word on what the second token was drawn from.
    proposal = worker_pb2.Proposal(
        token_ids=[7, 8], candidate_counts=[1], candidate_ids=bytes(4), candidate_probs=bytes(4)
    )
    verify = target_pb2.Verify(sequence_id=4, position=3, proposal=proposal, num_steps=1)
    servicer._on_request(stream, target_request(verify))
    assert stream.sent == []
    assert len(sequence.proposal) == 0
    assert sequence.num_steps == 1


class Index:
    """What the prefix index hears of a worker."""

    def __init__(self) -> None:
        self.held: set[bytes] = set()
        self.num_evicted = 0

    def stored(self, hashes: list[bytes]) -> None:
        self.held |= set(hashes)

    def evicted(self, hashes: list[bytes]) -> None:
        self.held -= set(hashes)
        self.num_evicted += len(hashes)


@pytest.mark.parametrize("num_slots", [0, 2, 50])
async def test_the_index_counts_a_block_as_held_until_it_has_left_host_memory_too(num_slots: int) -> None:
    blocks = BlockPool(8, HostTier(num_slots, SimulatedMover({})) if num_slots else None)
    servicer, index = with_engine(TargetServicer(configure("t", None), "x"), blocks), Index()
    servicer.publish_to(index)
    for first_token in (1, 11, 1, 21, 31, 11):
        request = prefill(max_tokens=1)
        request.token_ids[:] = range(first_token, first_token + 17)
        del request.forks[:]
        servicer._on_request(Sent(), target_request(request))
        while not servicer.engine.scheduler.is_empty:
            step(servicer)
        assert index.held == set(blocks.findable())
    assert (index.num_evicted > 0) == (num_slots < 50)
    # One of the pool's blocks is free: it held the last prompt's last token.
    assert len(index.held) == min(7 + num_slots, 16)


async def test_a_sequence_out_of_step_is_unknown_and_released() -> None:
    servicer, stream = with_engine(TargetServicer(configure("t", None), "x")), Sent()
    servicer._on_request(stream, target_request(prefill()))
    verify = target_pb2.Verify(sequence_id=4, position=9, num_steps=1)
    servicer._on_request(stream, target_request(verify))
    assert [each.status for each in stream.sent[0].results] == [target_pb2.STEP_STATUS_UNKNOWN_SEQUENCE]
    assert set(stream.lanes) == {5, 6}
    servicer._on_stream_end(stream)
    assert servicer._lanes == {}


def propose(base_length: int, num_tokens: int, num_draft_tokens: int = 4, sequence_id: int = 1) -> draft_pb2.Propose:
    return draft_pb2.Propose(
        sequence_id=sequence_id,
        base_length=base_length,
        token_ids=[1] * num_tokens,
        num_draft_tokens=num_draft_tokens,
        num_prompt_tokens=3,
        params=params_to_proto(SamplingParams()),
    )


async def test_a_drafter_with_no_context_left_says_so_and_lets_go() -> None:
    servicer, stream = with_engine(DraftServicer(configure("d", None), "x", False, SuffixSource(0))), Sent()
    servicer._on_request(stream, draft_request(propose(0, MAX_CONTEXT)))
    servicer._on_request(stream, draft_request(propose(0, MAX_CONTEXT - 2)))
    sequence = sequences(servicer)[0]
    assert sequence.num_steps == 2, "no more than the context holds"
    servicer._on_request(stream, draft_request(propose(MAX_CONTEXT - 2, 2)))
    assert [(each.position, each.status) for sent in stream.sent for each in sent.results] == [
        (MAX_CONTEXT, draft_pb2.DRAFT_STATUS_CONTEXT_EXCEEDED)
    ] * 2
    assert servicer._drafters == {}
    assert_empty(servicer, stream)


async def test_a_drafter_does_not_know_what_it_was_not_told() -> None:
    servicer, stream = with_engine(DraftServicer(configure("d", None), "x", False, SuffixSource(0))), Sent()
    servicer._on_request(stream, draft_request(propose(3, 1)))
    servicer._on_request(stream, draft_request(propose(0, 3, num_draft_tokens=0)))
    servicer._on_request(stream, draft_request(propose(4, 1)))
    assert [each.status for sent in stream.sent for each in sent.results] == [
        draft_pb2.DRAFT_STATUS_UNKNOWN_SEQUENCE
    ] * 2
    assert stream.lanes.keys() == {1}
    servicer._on_request(stream, draft_request(1, 77))
    assert servicer._drafters == servicer._lanes == {}


@pytest.mark.parametrize("released", list(itertools.permutations((4, 5, 6))))
async def test_a_prefill_and_its_releases_in_one_message_leave_nothing(released: tuple[int, ...]) -> None:
    servicer, stream = with_engine(TargetServicer(configure("t", None), "x")), Sent()
    servicer._on_request(stream, target_request(prefill(), *released))
    assert_empty(servicer, stream)
    verify = target_pb2.Verify(sequence_id=4, position=3, num_steps=1)
    servicer._on_request(stream, target_request(*released, prefill(first_id=7), verify, 9, 7))
    assert set(stream.lanes) == {8}
    assert len(sequences(servicer)) == 1
    assert [(each.sequence_id, each.status) for sent in stream.sent for each in sent.results] == [
        (4, target_pb2.STEP_STATUS_UNKNOWN_SEQUENCE)
    ]
    servicer._on_request(stream, target_request(8))
    assert_empty(servicer, stream)


def tell(token_ids: list[int], base_length: int = 0, sequence_id: int = 1, **fields: Any) -> draft_pb2.Propose:
    params = params_to_proto(SamplingParams(temperature=0.0))
    return draft_pb2.Propose(
        sequence_id=sequence_id, base_length=base_length, token_ids=token_ids, num_draft_tokens=2, num_prompt_tokens=3,
        params=params, **fields,
    )  # fmt: skip


def disappoint(servicer: DraftServicer) -> None:
    """None of the model's tokens is accepted, and more is hoped of what is copied."""
    for _ in range(1000):
        servicer._acceptance.observe(1, 0)


async def test_what_may_be_copied_is_answered_with_at_once_and_to_its_own_tenant_alone() -> None:
    source = SuffixSource(100)
    servicer, stream = with_engine(DraftServicer(configure("d", None), "x", False, source)), Sent()
    disappoint(servicer)

    def proposed() -> list[list[int]]:
        results = [each for sent in stream.sent for each in sent.results]
        stream.sent.clear()
        return [list(each.proposal.token_ids) for each in results]

    servicer._on_request(stream, draft_request(tell([7, 8, 9, 7, 8], cache_salt=b"a")))
    assert proposed() == [[9, 7]]
    servicer._on_request(stream, draft_request(tell([9, 7, 5, 6], base_length=5), 1))
    assert_empty(servicer, stream)
    assert source.num_tokens == 6, "the output"
    for sequence_id, tenant, copied in ((2, b"b", []), (3, b"a", [[5, 6]])):
        servicer._on_request(
            stream, draft_request(tell([3, 9, 7], sequence_id=sequence_id, cache_salt=tenant), sequence_id)
        )
        assert proposed() == copied
    assert_empty(servicer, stream)


async def test_a_model_draws_no_further_where_its_tokens_are_not_wanted() -> None:
    servicer, stream = with_engine(DraftServicer(configure("d", None), "x", True, SuffixSource(100))), Sent()
    servicer._on_request(stream, draft_request(tell([1, 2, 3])))
    for _ in range(3):
        step(servicer)
    [sequence] = sequences(servicer)
    assert sequence.num_steps > 0, "on the guess that all is accepted"
    disappoint(servicer)
    stream.sent.clear()
    servicer._on_request(stream, draft_request(tell([1, 1, 7, 8, 9, 7, 8], base_length=3)))
    [result] = [each for sent in stream.sent for each in sent.results]
    assert list(result.proposal.token_ids) == [9, 7]
    assert (result.position, result.num_computed) == (10, 5), "what it had guessed right is computed"
    assert sequence.num_steps == 0
    assert servicer.engine.scheduler.schedule() is None
    servicer._on_request(stream, draft_request(1))
    assert_empty(servicer, stream)


async def test_without_a_model_every_question_is_answered_at_once() -> None:
    source = SuffixSource(100)
    servicer, stream = with_engine(DraftServicer(configure("d", None), "", False, source, has_model=False)), Sent()
    servicer._on_request(stream, draft_request(tell([7, 8, 9]), tell([1, 2], base_length=3), tell([7, 8], 5)))
    assert [list(each.proposal.token_ids) for sent in stream.sent for each in sent.results] == [[], [], [9, 1]]
    assert servicer.engine.scheduler.schedule() is None, "nothing is to be computed"
    servicer._on_request(stream, draft_request(1))
    assert_empty(servicer, stream)


async def test_a_proposal_and_its_release_in_one_message_leave_nothing() -> None:
    servicer, stream = with_engine(DraftServicer(configure("d", None), "x", False, SuffixSource(0))), Sent()
    servicer._on_request(stream, draft_request(propose(0, 3), 1, propose(0, 4, sequence_id=2), propose(4, 1), 1))
    assert set(stream.lanes) == {2}
    assert [(each.sequence_id, each.status) for sent in stream.sent for each in sent.results] == [
        (1, draft_pb2.DRAFT_STATUS_UNKNOWN_SEQUENCE)
    ]
    servicer._on_request(stream, draft_request(2))
    assert servicer._drafters == {}
    assert_empty(servicer, stream)


@pytest.mark.parametrize("seed", range(30))
async def test_it_means_nothing_how_operations_share_messages(seed: int) -> None:
    """Families of sequences begin, go on and end, several at once; steps are taken in between."""
    dice = random.Random(seed)
    servicer, stream = with_engine(TargetServicer(configure("t", None), "x")), Sent()
    lives: list[list[Any]] = []
    for first_id in range(10, 80, 10):
        ids = [first_id, first_id + 1, first_id + 2]
        verifies = [target_pb2.Verify(sequence_id=dice.choice(ids), position=3, num_steps=2) for _ in range(4)]
        # An order in which each release has the chance of being the operation right behind the prefill.
        lives.append([prefill(first_id=first_id), *dice.sample([*verifies, *ids], len(verifies) + len(ids))])
    released: set[int] = set()
    while any(lives):
        operations = []
        for _ in range(dice.randint(1, 12)):
            if going := [life for life in lives if life]:
                operations.append(dice.choice(going).pop(0))
        servicer._on_request(stream, target_request(*operations))
        released |= {operation for operation in operations if isinstance(operation, int)}
        assert not released & stream.lanes.keys()
        assert len(stream.lanes) == len(servicer._lanes) == len(sequences(servicer))
        for _ in range(dice.randrange(3)):
            step(servicer)
        servicer.engine.scheduler.check()
    assert_empty(servicer, stream)


async def test_answers_are_cut_into_messages_far_below_the_limit() -> None:
    """The largest answer there can be: every sequence of a step with all its candidates or log-probabilities."""
    drafter, stream = with_engine(DraftServicer(configure("d", None), "x", False, SuffixSource(0))), Sent()
    params = params_to_proto(SamplingParams())
    proposals = [
        draft_pb2.Propose(sequence_id=i, token_ids=[1] * 3, num_draft_tokens=16, num_prompt_tokens=3, params=params)
        for i in range(256)
    ]
    drafter._on_request(stream, draft_request(*proposals))
    gains = []
    for sequence in sequences(drafter):
        for token in range(16):
            sampled = SampledTokens((token,), candidates=Candidates(512, bytes(2048), bytes(2048)))
            sequence.token_ids.append(token)
            if token < 15:
                drafter._drafters[sequence].take(sampled)
        gains.append(Gain(sequence, sampled, 0))
    drafter._on_outcome(StepOutcome(gains, [], 256, 256, 0, 0.01))
    assert 4 <= len(stream.sent) < 10
    assert all(sent.ByteSize() < 1.01 * BUNDLE_BYTES and sent.stats.num_tokens == 256 for sent in stream.sent)
    assert [result.sequence_id for sent in stream.sent for result in sent.results] == list(range(256))
    assert all(len(result.proposal.candidate_ids) == 16 * 2048 for sent in stream.sent for result in sent.results)


async def test_results_and_refusals_are_cut_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundles, "BUNDLE_BYTES", 500)
    servicer, stream = with_engine(TargetServicer(configure("t", None), "x")), Sent()
    servicer._on_request(stream, target_request(*(prefill(MAX_CONTEXT, 10 * i) for i in range(100))))
    assert len(stream.sent) >= 3
    assert all(sent.ByteSize() < 1000 for sent in stream.sent)
    assert sum(len(sent.results) for sent in stream.sent) == 300
    stream.sent.clear()
    servicer._on_request(stream, target_request(prefill()))
    logprobs = (TokenLogprobs(-1.0, tuple((token, -1.0) for token in range(20))),)
    gains = [Gain(sequence, SampledTokens((1,), logprobs=logprobs), 0) for sequence in sequences(servicer)]
    servicer._on_outcome(StepOutcome(gains, [], 7, 3, 0, 0.01))
    assert [len(sent.results) for sent in stream.sent] == [2, 1]
    # One step, told once.
    assert [sent.HasField("stats") for sent in stream.sent] == [True, False]
    assert stream.sent[0].stats.num_tokens == 7


async def test_a_drafter_that_has_nothing_to_answer_for_long_gives_signs_of_life() -> None:
    servicer, stream, idle = (
        with_engine(DraftServicer(configure("d", None), "x", False, SuffixSource(0))),
        Sent(),
        Sent(),
    )
    servicer._on_request(stream, draft_request(propose(0, 25)))
    servicer._last_sign = math.inf
    step(servicer)
    assert stream.sent == [], "a chunk, and no hurry"
    servicer._last_sign = -math.inf
    servicer._on_outcome(StepOutcome([], [], 17, 1, 0, 0.01))
    servicer._on_outcome(StepOutcome([], [], 17, 1, 0, 0.01))
    assert [(len(sent.results), sent.stats.num_tokens) for sent in stream.sent] == [(0, 17)]
    assert idle.sent == []


async def test_a_step_that_brings_a_router_nothing_is_still_a_sign_of_life() -> None:
    """A chunk of a long prefill; routers measure a worker's silence against single steps."""
    servicer, stream, bystander = with_engine(TargetServicer(configure("t", None), "x")), Sent(), Sent()
    servicer._on_request(stream, target_request(prefill()))
    servicer._on_outcome(StepOutcome([], [], num_tokens=512, num_sequences=1, began_ns=0, seconds=0.25))
    [sent] = stream.sent
    assert (list(sent.results), sent.stats.num_tokens, sent.stats.seconds) == ([], 512, 0.25)
    assert bystander.sent == [], "of a router that has no sequences here"


async def test_a_worker_whose_engine_hangs_does_not_say_what_it_is() -> None:
    servicer = TargetServicer(configure("t", None), "x")
    submitted: asyncio.Queue[Any] = asyncio.Queue()
    info = worker_pb2.WorkerInfo(model="m")
    alive = SimpleNamespace(is_alive=lambda: True)
    loop: Any = SimpleNamespace(submit=submitted.put_nowait, _thread=alive)
    loop.ask = partial(EngineLoop.ask, loop)
    servicer._engine_loop = loop
    servicer._info = lambda: info  # type: ignore[method-assign]
    context: Any = None
    asked = asyncio.create_task(servicer.GetWorkerInfo(worker_pb2.GetWorkerInfoRequest(), context))
    answer = await submitted.get()
    assert not asked.done(), "the engine's thread has not come to it"
    answer()
    assert await asked == info


class Unhurried(RouterStream[Any]):
    """A stream whose event loop gets on while the engine's thread sends results."""

    def send(self, response: Any) -> None:
        if response.results:
            asyncio.run_coroutine_threadsafe(asyncio.sleep(0.01), self._loop).result()
        super().send(response)


async def test_a_worker_that_drains_ends_streams_behind_their_last_results() -> None:
    servicer, stream = with_engine(TargetServicer(configure("t", None), "x")), Unhurried()
    with ThreadPoolExecutor(1) as engine_thread:
        loop = servicer._engine_loop
        loop.submit, loop._thread = engine_thread.submit, SimpleNamespace(is_alive=lambda: True)
        loop.ask = partial(EngineLoop.ask, loop)
        servicer._streams.add(stream)
        engine_thread.submit(servicer._on_request, stream, target_request(prefill(max_tokens=1))).result()
        await asyncio.sleep(0)
        draining = asyncio.create_task(servicer.drain())
        await asyncio.sleep(0)
        # The prompt, and the forks that wait for it.
        for _ in range(2):
            engine_thread.submit(step, servicer)
        ended = [result.sequence_id async for response in stream.responses() for result in response.results]
        assert ended == [4, 5, 6]
        await draining


class Away:
    """A target servicer whose sequence 1 has ended a round, with a clock of its own.

    Absences take a second, steps ten; sequence 2 has a step to do.
    """

    def __init__(self, max_tokens: int = 20) -> None:
        self.now = 0.0
        self.servicer = with_engine(TargetServicer(configure("t", None), "x"))
        self.servicer.engine.step_costs = [(1, 10.0), (100, 10.0)]
        self.gathering = self.servicer._gathering = Gathering(lambda: self.now)
        self.stream, self.other = Sent(), Sent()
        self.begin(self.stream, 1, max_tokens)
        step(self.servicer)
        assert not self.gathering.any_away, "a prefill, or a plain step, is no round"
        self.servicer._on_request(self.stream, self.verify(position=4))
        step(self.servicer)

    @property
    def wait(self) -> float:
        found: float = self.servicer._seconds_to_wait()
        return found

    def begin(self, stream: Sent, sequence_id: int, max_tokens: int = 20) -> None:
        params = params_to_proto(SamplingParams(temperature=0.0, max_tokens=max_tokens))
        begins = target_pb2.Prefill(
            sequence_id=sequence_id, token_ids=[1, 2, 3], num_prompt_tokens=3, params=params, num_steps=1
        )
        self.servicer._on_request(stream, target_request(begins))

    def verify(self, position: int, num_draft_tokens: int = 2, num_steps: int = 1) -> target_pb2.TargetRequest:
        proposal = worker_pb2.Proposal(token_ids=[7] * num_draft_tokens) if num_draft_tokens else None
        return target_request(
            target_pb2.Verify(sequence_id=1, position=position, proposal=proposal, num_steps=num_steps)
        )


@pytest.mark.parametrize("num_draft_tokens", [2, 0])
async def test_a_step_waits_for_a_sequence_whose_round_ended_until_it_speaks_again(num_draft_tokens: int) -> None:
    away = Away()
    assert away.gathering.any_away
    assert away.wait == 0.0, "nothing is known of how long it takes"
    away.now += 1.0
    away.servicer._on_request(away.stream, away.verify(position=5, num_draft_tokens=num_draft_tokens))
    assert not away.gathering.any_away
    assert away.wait == 0.0
    step(away.servicer)
    assert away.gathering.any_away is bool(num_draft_tokens)
    if num_draft_tokens:
        assert away.wait == 0.0, "there is no step to be done"
        away.begin(away.other, 2)
        assert 1.0 <= away.wait < 10.0
        away.servicer.engine.step_costs = []
        assert away.wait == 0.0, "before the warm-up"


async def test_one_that_goes_on_without_a_draft_says_nothing_of_how_long_drafts_take() -> None:
    away = Away()
    for position, num_draft_tokens, absence in ((5, 2, 1.0), (6, 0, 0.001), (7, 2, 0.0)):
        away.now += absence
        away.servicer._on_request(away.stream, away.verify(position, num_draft_tokens))
        step(away.servicer)
    away.begin(away.other, 2)
    assert away.wait == pytest.approx(1.0)


async def test_a_round_with_more_steps_granted_behind_it_is_not_waited_for() -> None:
    away = Away()
    away.servicer._on_request(away.stream, away.verify(position=5, num_steps=2))
    step(away.servicer)
    assert not away.gathering.any_away


async def test_a_sequence_that_ends_by_its_round_is_not_waited_for() -> None:
    away = Away(max_tokens=2)
    assert away.stream.sent[-1].results[0].status == target_pb2.STEP_STATUS_LENGTH
    assert away.stream.sent[-1].results[0].num_draft_tokens > 0
    assert not away.gathering.any_away


@pytest.mark.parametrize("how", ["release", "stream end", "out of step", "failure", "begun again"])
async def test_a_sequence_that_is_gone_is_not_waited_for(how: str) -> None:
    away = Away()
    [sequence] = sequences(away.servicer)
    assert away.gathering.any_away
    match how:
        case "release":
            away.servicer._on_request(away.stream, target_request(1))
        case "stream end":
            away.servicer._on_stream_end(away.stream)
        case "out of step":
            away.servicer._on_request(away.stream, away.verify(position=9))
        case "failure":
            away.servicer._on_outcome(StepOutcome([], [sequence], 1, 1, 0, 0.01))
        case "begun again":
            away.begin(away.stream, 1)
    assert not away.gathering.any_away
    assert away.wait == 0.0


async def test_a_drafter_waits_for_nobody() -> None:
    assert with_engine(DraftServicer(configure("d", None), "x", False, SuffixSource(0)))._seconds_to_wait() == 0.0


async def test_signs_of_life_do_not_pile_up_for_a_router_that_does_not_read() -> None:
    stream: RouterStream[Any] = RouterStream()
    for i in range(1000):
        stream.send_sign_of_life(i)
    stream.send("news")
    stream.send_sign_of_life(1000)
    stream.end()
    await asyncio.sleep(0)
    assert [response async for response in stream.responses()] == [0, "news"]


# Routers beside each other


def others(stream: Sent) -> list[tuple[int, int, int]]:
    """What was told of others since the last time: sequences with and without a first token, tokens of these."""
    told = [
        (each.others.num_decoding, each.others.num_waiting, each.others.num_prefill_tokens)
        for each in stream.sent
        if each.HasField("others")
    ]
    stream.sent.clear()
    return told


async def test_routers_are_told_of_each_others_sequences() -> None:
    servicer, now = with_engine(TargetServicer(configure("t", None), "x")), 0.0
    servicer._neighbours = Neighbours(lambda: now)
    one, other, third = Sent(), Sent(), Sent()
    servicer._on_stream_begin(one)
    assert one.sent == []
    servicer._on_request(one, target_request(prefill()))
    step(servicer)
    assert others(one) == [], "there is nobody else"
    servicer._on_stream_begin(other)
    servicer._on_stream_begin(third)
    # Two forks of the three wait for their place.
    assert others(other)[-1] == others(third)[-1]
    servicer._on_request(other, target_request(prefill(first_id=9)))
    while servicer.engine.scheduler.ready()[0]:
        step(servicer)
    assert others(one)[-1] == (3, 0, 0)
    assert others(other)[-1] == (3, 0, 0)
    assert others(third) == [], "who has nothing here is not told with every step"
    now = 1.0
    servicer._on_request(one, target_request(target_pb2.Verify(sequence_id=4, position=4, num_steps=1)))
    step(servicer)
    assert others(third) == [(6, 0, 0)]
    # A router that dies takes its sequences with it.
    servicer._on_stream_end(one)
    assert others(other)[-1] == (0, 0, 0)
    assert others(third)[-1] == (3, 0, 0)
    servicer._on_request(other, target_request(9, 10, 11))
    assert others(third) == [(0, 0, 0)], "no step tells of a worker that is idle"
    servicer._on_stream_end(third)
    assert others(other)[-1] == (0, 0, 0)
    assert_empty(servicer, other)


async def test_prompts_in_steps_are_told_by_whose_they_are() -> None:
    servicer = with_engine(TargetServicer(configure("t", None), "x"))
    one, other = Sent(), Sent()
    for stream, first_id in ((one, 4), (other, 7)):
        servicer._on_stream_begin(stream)
        long = prefill(first_id=first_id)
        long.token_ids.extend(range(10))
        long.num_prompt_tokens = len(long.token_ids)
        del long.forks[:]
        servicer._on_request(stream, target_request(long))
    waiting = [others(stream)[-1:] for stream in (one, other)]
    assert waiting[0] == [(0, 0, 0)]
    # Room for 20 tokens: the first whole, half of the second.
    step(servicer)
    told = {
        stream: [(each.stats.num_prefill_tokens, each.stats.num_own_prefill_tokens) for each in stream.sent]
        for stream in (one, other)
    }
    assert told == {one: [(19, 12)], other: [(19, 7)]}
    assert others(one) == [(0, 1, 6)]
    assert others(other) == [(1, 0, 0)]
