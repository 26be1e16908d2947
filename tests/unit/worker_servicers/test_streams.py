"""How workers and routers share messages: order, sizes, signs of life, and the end of a stream."""

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
from services.target.server import TargetServicer
from shared.copying.suffix_source import SuffixSource
from shared.engine.engine import Gain, StepOutcome
from shared.engine.loop import EngineLoop
from shared.sampling.params import SamplingParams
from shared.sampling.sampled import Candidates, SampledTokens, TokenLogprobs
from shared.telemetry.tracing import configure
from shared.worker import bundles
from shared.worker.bundles import BUNDLE_BYTES
from shared.worker.messages import params_to_proto
from shared.worker.stream import RouterStream
from tests.support.worker_servicers import (
    MAX_CONTEXT,
    Sent,
    assert_empty,
    draft_request,
    prefill,
    propose,
    sequences,
    step,
    target_request,
    with_engine,
)


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


async def test_signs_of_life_do_not_pile_up_for_a_router_that_does_not_read() -> None:
    stream: RouterStream[Any] = RouterStream()
    for i in range(1000):
        stream.send_sign_of_life(i)
    stream.send("news")
    stream.send_sign_of_life(1000)
    stream.end()
    await asyncio.sleep(0)
    assert [response async for response in stream.responses()] == [0, "news"]
