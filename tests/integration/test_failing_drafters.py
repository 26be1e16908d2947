"""Drafters that fail, hang or forget, asked for rounds or by scouts: it costs no token."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from services.router.workers import draft_link
from services.router.workers.draft_link import DraftLink
from shared.policy.gamma import GammaController
from shared.policy.step_costs import StepCosts
from tests.support.fake_drafter import Answer
from tests.support.fake_target import STEP_SECONDS
from tests.support.fake_workers import plain_output
from tests.support.router_stack import GREEDY, MAX_TOKENS, PROMPT, Output, Stack, expected_rounds, greedy, stack, until

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def quick_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_link, "_LEAST_PATIENCE_SECONDS", 0.05)
    monkeypatch.setattr(draft_link, "_SILENCE_SECONDS", 0.2)


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
    controller = s.fleet.gamma(s.fleet.targets[0], s.fleet.drafts[0])
    assert controller is not None
    controller._costs.draft = StepCosts([(1, 0.15 * STEP_SECONDS)])
    for _ in range(100):
        controller.acceptance.observe(8, 0)
    controller._scouting._last_round -= 60
    return controller


async def test_a_scout_that_is_due_goes_while_its_sequence_decodes_plainly() -> None:
    async with stack(max_num_nodes=0) as s:
        assert s.drafter is not None
        acceptance = make_scout_due(s).acceptance
        rate = acceptance.rate
        output = await s.generate(greedy(max_tokens=40))
        assert output.tokens == {0: plain_output(PROMPT, 40)}
        assert output.usage is not None
        assert output.usage.rounds == 0
        assert 1 <= s.drafter.num_asked <= 10, "some proposals, to see whether it pays by now"
        assert acceptance.rate > rate, "they were good"
        await s.until_idle()


async def test_a_scout_drafts_in_rounds_where_the_target_draws_by_other_noise() -> None:
    async with stack(max_num_nodes=0) as s:
        make_scout_due(s)
        usage = (await s.generate(greedy(temperature=1.0))).usage
        assert usage is not None
        assert 1 <= usage.rounds <= 13


@pytest.mark.parametrize("answer", list(Answer))
@pytest.mark.usefixtures("quick_hang")
async def test_a_drafter_that_fails_a_scout_costs_nothing(answer: Answer) -> None:
    async with stack(max_num_nodes=0) as s:
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
async def test_a_drafter_that_hangs_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    # Longer than the request takes: it is all over before the link is connected anew.
    monkeypatch.setattr(draft_link, "_SILENCE_SECONDS", 3.0)
    async with stack() as s:
        assert s.drafter is not None
        s.drafter.answer = Answer.HANG
        epoch = s.fleet.drafts[0].epoch
        assert (await s.generate(greedy(3, max_tokens=100))).tokens == {0: plain_output(PROMPT, 100)}
        assert s.drafter.num_asked == 1
        link = s.fleet.drafts[0]
        await until(lambda: link.epoch > epoch and link.connected, "connected anew")
        s.drafter.answer = Answer.PROPOSE
        usage = (await s.generate(greedy(3))).usage
        assert usage is not None
        assert usage.rounds > 0
        await s.until_idle()


@pytest.mark.usefixtures("quick_hang")
async def test_a_sequence_that_the_drafter_keeps_waiting_does_not_cost_the_others_theirs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A machine that stands still for a moment is no silence of the drafter's.
    monkeypatch.setattr(draft_link, "_SILENCE_SECONDS", 60.0)
    async with stack() as s:
        assert s.drafter is not None
        epoch = s.fleet.drafts[0].epoch
        s.drafter.answers = {0: Answer.HANG}
        outputs = await asyncio.gather(*(s.generate(greedy(1, max_tokens=400)) for _ in range(3)))
        assert all(output.tokens == {0: plain_output(PROMPT, 400)} for output in outputs)
        assert s.fleet.drafts[0].epoch == epoch
        assert sorted(output.usage.rounds > 0 for output in outputs if output.usage) == [False, True, True]


async def test_a_late_proposal_costs_neither_the_link_nor_the_sequence_its_drafter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(draft_link, "_LEAST_PATIENCE_SECONDS", 0.05)
    monkeypatch.setattr(draft_link, "_FIRST_PAUSE_SECONDS", 0.01)
    async with stack() as s:
        assert s.drafter is not None
        link, drafter, epoch = s.fleet.drafts[0], s.drafter, s.fleet.drafts[0].epoch
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


async def lose_drafter(s: Stack) -> DraftLink:
    """Stops it; returns the router's link once that has noticed."""
    assert s.drafter is not None
    link = s.fleet.drafts[0]
    await s.drafter.stop()
    await until(lambda: not link.connected, "loss noticed")
    return link


async def test_a_drafter_of_shorter_context_is_not_asked_beyond_it() -> None:
    async with stack() as s:
        assert s.drafter is not None
        link = await lose_drafter(s)
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
        link = await lose_drafter(s)
        output = await s.generate(greedy(3))
        assert output.tokens == {0: GREEDY}
        assert output.usage is not None
        assert output.usage.rounds == 0
        await s.drafter.start()
        await until(lambda: link.connected, "connected again")
        usage = (await s.generate(greedy(3))).usage
        assert usage is not None
        assert usage.rounds == len(expected_rounds(3, MAX_TOKENS))
