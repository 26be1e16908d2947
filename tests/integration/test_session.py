"""The router from call to last token, over real gRPC, with workers that have no model."""

from __future__ import annotations

import asyncio
from unittest import mock

import pytest
from outrider.v1 import inference_pb2

from shared.policy.drafting import Drafting, Situation
from shared.policy.gamma import GammaController
from shared.policy.shape import Shape
from shared.policy.step_costs import StepCosts
from tests.support.fake_drafter import Answer
from tests.support.fake_workers import plain_output
from tests.support.router_stack import GREEDY, MAX_TOKENS, PROMPT, TOKENIZER, expected_rounds, greedy, stack, until

pytestmark = pytest.mark.timeout(60)

LONG = [5, 17, 40, 8] * 40


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


async def test_who_never_drafts_is_granted_more_than_the_first_step_with_its_prompt() -> None:
    """Its second token does not wait for the router to ask; who may draft is asked behind the first."""
    async with stack() as s:
        await s.generate(greedy(0))
        await s.generate(greedy(speculation=inference_pb2.Speculation(enabled=False)))
        await s.generate(greedy(2))
        await s.generate(greedy())
        ahead, *others = [prefill.num_steps for prefill in s.target.prefills]
        assert ahead >= 8
        assert others == [ahead, 1, 1]
    async with stack(drafter=False) as s:
        await s.generate(greedy())
        assert [prefill.num_steps for prefill in s.target.prefills] == [ahead]


async def test_who_has_the_same_beginning_follows_a_prompt_that_is_being_computed() -> None:
    """The other worker is idle, and would have to compute it again; the index does not know of it yet, or is away."""
    prompts = [[*LONG, 1 + number, 2, 3] for number in range(4)]
    async with stack(num_targets=2, drafter=False, redis_url="redis://127.0.0.1:1") as s:
        for target, link in zip(s.targets, s.fleet.targets, strict=True):
            target.gate.clear()
            # Half a second for a prompt.
            link.costs = StepCosts([(1, 0.01), (128, 0.4)])
        requests = [greedy(0, 4) for _ in prompts]
        for request, prompt in zip(requests, prompts, strict=True):
            request.token_ids.ids[:] = prompt
        running = []
        for number, request in enumerate(requests):
            running.append(asyncio.create_task(s.generate(request)))
            await until(lambda number=number: sum(len(each.prefills) for each in s.targets) > number, "placed")  # type: ignore[misc]
        assert sorted(len(each.prefills) for each in s.targets) == [0, len(prompts)]
        [holder] = [link for link in s.fleet.targets if link.num_lanes]
        # The first computes it all, the others what is their own.
        full = len(LONG) // 16 * 16
        assert holder.backlog.num_tokens == len(LONG) + 3 + 3 * (len(LONG) + 3 - full)
        for target in s.targets:
            target.gate.set()
        outputs = [await each for each in running]
        assert [output.tokens for output in outputs] == [{0: plain_output(prompt, 4)} for prompt in prompts]
        await s.until_idle()
        assert not holder.backlog.block_hashes


async def test_sequences_that_never_draft_do_not_tell_how_long_those_that_do_become() -> None:
    async with stack() as s:
        controller = s.fleet.gamma(s.fleet.targets[0], s.fleet.drafts[0])
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


async def test_sequences_that_never_draft_tell_those_that_do_what_plain_steps_take() -> None:
    async with stack() as s:
        controller = s.fleet.gamma(s.fleet.targets[0], s.fleet.drafts[0])
        assert controller is not None
        with mock.patch.object(controller, "observe_plain", wraps=controller.observe_plain) as observed:
            await s.generate(greedy(0, max_tokens=200))
        assert {call.args[0] for call in observed.call_args_list} == {1}


async def test_trees_that_the_policy_asks_for_are_drafted_and_learnt_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """The drafter's hold what the target draws: each round brings all that it is deep, and a token of the target's."""

    def choose(controller: GammaController, sequence: Drafting, situation: Situation) -> int:
        controller.shape = Shape(3, 8)
        sequence.num_nodes = 8
        return 3

    monkeypatch.setattr(GammaController, "choose", choose)
    async with stack() as s:
        controller = s.fleet.gamma(s.fleet.targets[0], s.fleet.drafts[0])
        assert controller is not None
        assert s.drafter is not None
        expected = controller.trees.tokens(0.7, Shape(3, 8))
        output = await s.generate(greedy(max_tokens=1 + 5 * 4 + 3))
        assert output.tokens == {0: plain_output(PROMPT, 24)}
        assert output.usage is not None
        assert output.usage.accepted_tokens == 5 * 3 + 2
        assert s.drafter.trees == [(3, 8)] * 5 + [(2, 5)], "the last no larger than what may follow"
        assert controller.trees.tokens(0.7, Shape(3, 8)) > expected
        await s.until_idle()
        seen = s.drafter.trees.copy()
        await s.generate(greedy(speculation=inference_pb2.Speculation(num_draft_tokens=4, num_nodes=10)))
        assert set(s.drafter.trees[len(seen) :]) >= {(4, 10)}


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


@pytest.mark.parametrize(("num_own_drafts", "tells"), [(5, False), (0, True)])
async def test_steps_in_which_a_target_drafts_for_one_whom_nobody_else_does_are_no_plain_steps(
    num_own_drafts: int, tells: bool
) -> None:
    """They take longer, so that rounds would seem to pay beside them."""
    async with stack() as s:
        s.target.num_own_drafts = num_own_drafts
        controller = s.fleet.gamma(s.fleet.targets[0], s.fleet.drafts[0])
        assert controller is not None
        sources = [inference_pb2.DRAFT_SOURCE_TARGET]
        with mock.patch.object(controller, "observe_plain", wraps=controller.observe_plain) as observed:
            await s.generate(greedy(speculation=inference_pb2.Speculation(sources=sources), max_tokens=200))
        assert observed.called is tells
        await s.until_idle()


async def test_what_a_target_drafts_itself_is_none_of_the_drafters() -> None:
    """Who finds nothing is not credited with what the target found instead."""
    async with stack() as s:
        assert s.drafter is not None
        s.target.num_own_drafts = 5
        s.drafter.answer = Answer.EMPTY
        controller = s.fleet.gamma(s.fleet.targets[0], s.fleet.drafts[0])
        assert controller is not None
        before = controller.acceptance.rate
        assert (await s.generate(greedy(4))).tokens == {0: GREEDY}
        assert s.drafter.num_asked > 0
        assert controller.acceptance.rate < before
        await s.until_idle()
