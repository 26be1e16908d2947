from __future__ import annotations

import random

import pytest

from services.draft.drafter import Drafter
from shared.engine.sequence import Sequence
from shared.policy.foresight import Foresight
from shared.sampling.params import SamplingParams
from shared.sampling.proposal import Proposal
from shared.sampling.sampled import Candidates, SampledTokens

PROMPT = [3, 1, 4, 1, 5]


def drafter(prompt: list[int] = PROMPT) -> Drafter:
    return Drafter(Sequence(prompt, len(prompt), SamplingParams(), b"root", drafting=True), Foresight())


def mark(token: int) -> Candidates:
    """Candidates that tell which draw they belong to."""
    return Candidates(1, token.to_bytes(4, "little"), b"")


def proposal(token_ids: list[int], candidates: list[Candidates]) -> Proposal:
    return Proposal(tuple(token_ids), sources=("model",) * len(token_ids)).drawn_from(candidates)


def run(d: Drafter, draws: list[int]) -> None:
    """The engine's steps: one draw each, in turn, while the sequence may sample."""
    queue = list(draws)
    while d.sequence.num_steps > 0:
        token = queue.pop(0)
        sampled = SampledTokens((token,), candidates=mark(token))
        d.sequence.num_computed_tokens = len(d.sequence.token_ids)
        d.sequence.advance(sampled)
        d.take(sampled)
    assert queue == [], "drew less than it was given"


def test_a_proposal_takes_as_many_draws_as_were_asked_for() -> None:
    d = drafter()
    d.ask(3)
    assert not d.answerable
    assert d.sequence.num_steps == 3
    run(d, [10, 11, 12])
    assert d.answerable
    assert d.answer() == proposal([10, 11, 12], [mark(10), mark(11), mark(12)])
    assert not d.answerable
    assert d.sequence.num_pending_tokens == 0


def test_a_prefill_computes_all_but_the_last_token_and_draws_nothing() -> None:
    d = drafter()
    d.prefill()
    assert d.sequence.num_steps == 0
    assert d.sequence.num_pending_tokens == len(PROMPT) - 1
    assert not d.answerable


def test_what_was_to_be_prefilled_ends_with_what_is_known_when_later_draws_fall() -> None:
    d = drafter()
    d.ask(4)
    run(d, [10, 11, 12, 13])
    d.answer()
    d.commit(5, [10])
    d.prefill()
    assert d.sequence.num_pending_tokens == 0, "three draws survive, with their KV"
    d.commit(6, [99])
    d.ask(1)
    run(d, [20])
    assert d.answer() == proposal([20], [mark(20)])
    assert d.sequence.num_pending_tokens == 0


def test_nothing_is_ever_to_be_computed_beyond_what_is_known() -> None:
    """Commits, prefills and proposals in any order a router may send them."""
    dice = random.Random(0)
    for _ in range(300):
        d = drafter()
        for _ in range(12):
            sequence, drawn = d.sequence, d.sequence.num_drawn
            agreeing = sequence.token_ids[-drawn:][: dice.randint(0, drawn)] if drawn else []
            d.commit(
                sequence.num_committed, agreeing + [dice.randrange(100, 1000)] * dice.randint(0 if agreeing else 1, 3)
            )
            if dice.random() < 0.4:
                d.prefill()
            else:
                d.ask(dice.randint(1, 6))
                run(d, [dice.randrange(100) for _ in range(sequence.num_steps)])
                assert d.answerable
                d.answer()
                if dice.random() < 0.5:
                    d.guess_on(2)
                    run(d, [dice.randrange(100) for _ in range(sequence.num_steps)])
            end = sequence.num_computed_tokens + sequence.num_pending_tokens
            assert end <= len(sequence.token_ids)
            assert len(sequence.tokens_between(sequence.num_computed_tokens, end)) == sequence.num_pending_tokens


def test_rejected_draws_are_dropped_with_their_candidates() -> None:
    d = drafter()
    d.ask(3)
    run(d, [10, 11, 12])
    d.answer()
    d.commit(len(PROMPT), [10, 99])
    assert d.sequence.token_ids == [*PROMPT, 10, 99]
    assert d.sequence.num_drawn == 0
    assert d.candidates == []
    # 10 was computed when 11 was drawn; 99 never was.
    assert d.sequence.num_computed_tokens == len(PROMPT) + 1
    d.ask(2)
    run(d, [20, 21])
    assert d.answer() == proposal([20, 21], [mark(20), mark(21)])


def test_all_accepted_keeps_the_kv_and_owes_the_last_draw_one_forward() -> None:
    d = drafter()
    d.ask(2)
    run(d, [10, 11])
    d.answer()
    d.commit(len(PROMPT), [10, 11, 50])
    assert d.sequence.token_ids == [*PROMPT, 10, 11, 50]
    assert d.sequence.num_computed_tokens == len(PROMPT) + 1
    assert d.sequence.num_drawn == 0


def test_a_right_guess_is_the_beginning_of_the_next_proposal() -> None:
    d = drafter()
    d.ask(2)
    run(d, [10, 11])
    d.answer()
    d.guess_on(2)
    run(d, [50, 20, 21])
    d.commit(len(PROMPT), [10, 11, 50])
    assert d.sequence.num_drawn == 2
    d.ask(2)
    assert d.answerable, "at once"
    assert d.sequence.num_steps == 0
    assert d.answer() == proposal([20, 21], [mark(20), mark(21)])


def test_a_right_guess_that_is_not_enough_is_drawn_on() -> None:
    d = drafter()
    d.ask(2)
    run(d, [10, 11])
    d.answer()
    d.guess_on(1)
    run(d, [50, 20])
    d.commit(len(PROMPT), [10, 11, 50])
    d.ask(3)
    assert not d.answerable
    run(d, [21, 22])
    assert d.answer() == proposal([20, 21, 22], [mark(20), mark(21), mark(22)])


@pytest.mark.parametrize("committed", [[10, 11, 77], [10, 77], [77]])
def test_a_wrong_guess_costs_its_draws_only(committed: list[int]) -> None:
    d = drafter()
    d.ask(2)
    run(d, [10, 11])
    d.answer()
    d.guess_on(2)
    run(d, [50, 20, 21])
    d.commit(len(PROMPT), committed)
    assert d.sequence.token_ids == [*PROMPT, *committed]
    assert d.sequence.num_drawn == 0
    assert d.candidates == []
    assert d.sequence.num_computed_tokens == len(PROMPT) + len(committed) - 1


def test_a_commit_takes_back_what_was_asked() -> None:
    d = drafter()
    d.ask(3)
    d.commit(len(PROMPT), [10])
    assert not d.answerable
    d.ask(1)
    run(d, [11])
    assert d.answer() == proposal([11], [mark(11)])


def test_random_lives_keep_tokens_and_candidates_in_step() -> None:
    rng = random.Random(3)
    for _ in range(300):
        d = drafter()
        committed = list(PROMPT)
        for _ in range(rng.randrange(1, 8)):
            count = rng.randrange(1, 5)
            d.ask(count)
            run(d, [rng.randrange(3) for _ in range(d.sequence.num_steps)])
            drawn = d.answer().token_ids
            assert len(drawn) == count
            assert d.candidates[:count] == [mark(token) for token in drawn]
            if rng.random() < 0.7:
                d.guess_on(rng.randrange(1, 4))
                run(d, [rng.randrange(3) for _ in range(d.sequence.num_steps)])
            accepted = rng.randrange(count + 1)
            new = [*drawn[:accepted], rng.randrange(3)]
            d.commit(len(committed), new)
            committed += new
            assert d.sequence.token_ids[: d.sequence.num_committed] == committed
            assert d.candidates == [mark(token) for token in d.sequence.token_ids[d.sequence.num_committed :]]
            assert d.sequence.num_computed_tokens < len(d.sequence.token_ids)
