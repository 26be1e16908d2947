"""What the router knows of a target's queue: sequences begin, get their first results, end and are lost."""

from __future__ import annotations

import asyncio
import random

import pytest
from outrider.v1 import target_pb2, worker_pb2

from services.router.workers.target_lane import LaneResult, TargetLane, WorkerLost
from services.router.workers.target_link import TargetLink
from shared.policy.step_costs import StepCosts
from shared.sampling.params import SamplingParams


def connected() -> TargetLink:
    link = TargetLink("localhost:1", lambda _: None, asyncio.Condition())
    link.info = worker_pb2.WorkerInfo(instance_id="w", max_batch_tokens=512)
    return link


def prefill(link: TargetLink, num_tokens: int, num_sequences: int = 1) -> list[TargetLane]:
    params = [SamplingParams(sequence_index=i) for i in range(num_sequences)]
    return link.prefill([1] * num_tokens, num_tokens, params, 1, b"", "")


def answer(link: TargetLink, lane: TargetLane, status: int = target_pb2.STEP_STATUS_RUNNING) -> None:
    result = target_pb2.StepResult(sequence_id=lane.sequence_id, token_ids=[1])
    result.status = status  # type: ignore[assignment]
    link._on_response(target_pb2.TargetResponse(results=[result]))


def queued(link: TargetLink) -> tuple[int, int]:
    """Sequences without a result, and what they have still to compute."""
    return link.backlog.num_sequences, link.backlog.num_tokens


async def test_a_sequence_counts_as_waiting_until_its_first_result() -> None:
    link = connected()
    assert queued(link) == (0, 0)
    [one], [other] = prefill(link, 100), prefill(link, 30)
    assert queued(link) == (2, 130)
    link._on_response(target_pb2.TargetResponse(stats=worker_pb2.StepStats(num_tokens=64, seconds=0.1)))
    assert queued(link) == (2, 130), "a chunk of a prefill is no result"
    answer(link, other)
    assert queued(link) == (1, 100)
    answer(link, other)
    other.release()
    assert queued(link) == (1, 100)
    answer(link, one)
    assert queued(link) == (0, 0)
    assert link.num_lanes == 1


async def test_what_a_step_computed_of_prompts_is_no_backlog_any_more() -> None:
    link = connected()

    def step(num_prefill_tokens: int) -> None:
        stats = worker_pb2.StepStats(
            num_tokens=500,
            num_prefill_tokens=500,
            num_own_prefill_tokens=num_prefill_tokens,
            seconds=0.1,
        )
        link._on_response(target_pb2.TargetResponse(stats=stats))

    [one], [two, _fork], [three] = prefill(link, 100), prefill(link, 30, 2), prefill(link, 50)
    step(64)
    assert queued(link) == (4, 36 + 30 + 50)
    step(64)
    # The one that came first keeps its last token until it has its result; who came next goes on.
    assert queued(link) == (4, 1 + 1 + 50)
    answer(link, one)
    answer(link, two)
    assert queued(link) == (2, 50)
    step(512)
    assert queued(link) == (2, 1)
    three.release()
    assert queued(link) == (1, 0)


async def test_blocks_are_coming_until_the_first_result_of_every_sequence_that_computes_them() -> None:
    link = connected()
    params = [SamplingParams(sequence_index=i) for i in range(3)]
    shared, own, other = [b"a", b"b", b"c"], [b"a", b"b", b"d"], [b"x", b"b"]
    [one, fork, _] = link.prefill([1] * 50, 50, params, 1, b"", "", num_held=32, block_hashes=shared)
    [two] = link.prefill([1] * 50, 50, params[:1], 1, b"", "", num_held=49, block_hashes=own)
    assert (link.backlog.num_sequences, link.backlog.num_tokens) == (4, 18 + 1)
    assert [link.backlog.depth(each) for each in (shared, own, other)] == [3, 3, 0]
    answer(link, fork)
    assert [link.backlog.depth(each) for each in (shared, own)] == [3, 3]
    answer(link, one)
    assert [link.backlog.depth(each) for each in (shared, own)] == [2, 3]
    two.release()
    assert [link.backlog.depth(each) for each in (shared, own)] == [0, 0]
    assert not link.backlog.block_hashes


@pytest.mark.parametrize(
    "status",
    [
        target_pb2.STEP_STATUS_LENGTH,
        target_pb2.STEP_STATUS_STOPPED,
        target_pb2.STEP_STATUS_TOO_LARGE,
        target_pb2.STEP_STATUS_FAILED,
        target_pb2.STEP_STATUS_UNKNOWN_SEQUENCE,
    ],
)
async def test_a_first_result_that_is_the_last_ends_the_waiting_too(status: int) -> None:
    link = connected()
    [lane] = prefill(link, 100)
    answer(link, lane, status)
    assert queued(link) == (0, 0)
    answer(link, lane, status)
    lane.release()
    assert queued(link) == (0, 0)
    assert link.num_lanes == 0


async def test_one_released_before_its_first_result_waits_no_more() -> None:
    link = connected()
    [one], [other] = prefill(link, 100), prefill(link, 30)
    one.release()
    assert queued(link) == (1, 30)
    one.release()
    answer(link, one)
    assert queued(link) == (1, 30)
    other.release()
    assert queued(link) == (0, 0)


async def test_forks_wait_for_one_prompt_computed_once() -> None:
    link = connected()
    lanes = prefill(link, 100, num_sequences=3)
    assert link.backlog.num_tokens == 100
    for lane in lanes:
        answer(link, lane)
    assert queued(link) == (0, 0)
    for lane in prefill(link, 100, num_sequences=3):
        lane.release()
    assert queued(link) == (0, 0)


async def test_with_the_connection_everything_that_waited_is_gone() -> None:
    link = connected()
    lanes = [*prefill(link, 100, num_sequences=2), *prefill(link, 30)]
    answer(link, lanes[2])
    link._on_lost()
    assert queued(link) == (0, 0)
    assert link.num_lanes == 0
    with pytest.raises(WorkerLost):
        await lanes[0].next()
    for lane in lanes:
        lane.release()
    assert queued(link) == (0, 0)
    # What begins on the next connection is counted for itself.
    prefill(link, 7)
    assert queued(link) == (1, 7)


@pytest.mark.parametrize("seed", range(30))
async def test_the_backlog_is_what_was_sent_and_not_yet_answered(seed: int) -> None:
    dice = random.Random(seed)
    link = connected()
    waiting: dict[TargetLane, int] = {}
    begun: list[TargetLane] = []
    for _ in range(200):
        what = dice.choice(["prefill", "prefill", "answer", "answer", "end", "release", "lose"])
        if what == "prefill":
            num_tokens = dice.randint(1, 99)
            [lane] = prefill(link, num_tokens)
            begun.append(lane)
            waiting[lane] = num_tokens
        elif what == "lose":
            if dice.random() < 0.1:
                link._on_lost()
                waiting.clear()
        elif begun:
            lane = dice.choice(begun)
            waiting.pop(lane, None)
            if what == "release":
                lane.release()
            else:
                ended = what == "end"
                answer(link, lane, target_pb2.STEP_STATUS_LENGTH if ended else target_pb2.STEP_STATUS_RUNNING)
        assert queued(link) == (len(waiting), sum(waiting.values()))
    for lane in begun:
        lane.release()
    assert queued(link) == (0, 0)


async def test_what_prompts_add_to_steps_is_not_counted_between_two_results() -> None:
    """Of a step of 100 tokens of prompts as much as they make a plain step of the one sequence longer; of one of 100,
    80 of prompts, as much as it is longer than one of 20."""
    link = connected()
    link.costs = StepCosts([(1, 0.01), (101, 0.11)])
    link.costs.observe = lambda *_: None  # type: ignore[method-assign]
    [lane] = prefill(link, 100)

    async def step(num_tokens: int, num_prefill_tokens: int, seconds: float, result: bool = True) -> LaneResult | None:
        running = target_pb2.STEP_STATUS_RUNNING
        results = [target_pb2.StepResult(sequence_id=lane.sequence_id, status=running)] if result else []
        stats = worker_pb2.StepStats(num_tokens=num_tokens, num_prefill_tokens=num_prefill_tokens, seconds=seconds)
        link._on_response(target_pb2.TargetResponse(results=results, stats=stats))
        return await lane.next() if result else None

    first, plain = await step(100, 100, 0.2), await step(20, 0, 0.03)
    assert first is not None
    assert plain is not None
    assert plain.seconds_since(first) == pytest.approx(plain.received - first.received)
    assert not plain.mostly_prompts(first)
    await step(100, 100, 0.25, result=False)
    mixed = await step(100, 80, 0.22)
    assert mixed is not None
    passed = mixed.received - plain.received
    assert passed - mixed.seconds_since(plain) == pytest.approx(0.25 * 0.1 / 0.109 + 0.22 * (1 - 0.029 / 0.109))
    assert mixed.mostly_prompts(plain)


async def test_other_routers_sequences_count_as_load() -> None:
    link = connected()
    others = worker_pb2.OtherLoad(num_decoding=5, num_waiting=2, num_prefill_tokens=300, kv_usage=0.5)
    link._on_response(target_pb2.TargetResponse(others=others))
    assert (link.num_decoding, link.num_waiting, link.backlog_tokens, link.kv_usage) == (5, 2, 300, 0.5)
    [lane] = prefill(link, 100)
    stats = worker_pb2.StepStats(num_tokens=64, seconds=0.1, kv_usage=0.75)
    link._on_response(target_pb2.TargetResponse(stats=stats, others=others))
    assert (link.num_decoding, link.num_waiting, link.backlog_tokens, link.kv_usage) == (5, 3, 400, 0.75)
    answer(link, lane)
    assert (link.num_decoding, link.num_waiting, link.backlog_tokens) == (6, 2, 300)
    link._on_lost()
    assert (link.num_decoding, link.num_waiting, link.backlog_tokens, link.kv_usage) == (0, 0, 0, 0.0)
