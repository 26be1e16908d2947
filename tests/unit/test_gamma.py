"""Choices of γ by hand."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from shared.policy.drafting import Drafting, Situation
from shared.policy.gamma import GammaController
from shared.policy.shape import Shape
from shared.policy.step_costs import StepCosts
from tests.support.gamma import MAX, Clock, at, controller, drafting, flat, situation


def test_nothing_is_drafted_when_verifying_costs_as_much_as_decoding() -> None:
    costs = StepCosts([(1, 0.01), (1024, 10.24)])
    for rate in (0.0, 0.5, 0.9):
        found = controller(costs, flat(0.0001), Clock())
        assert found.choose(drafting(rate), situation()) == 0


def test_as_much_as_allowed_is_drafted_when_verifying_is_free_and_acceptance_high() -> None:
    for most in (0, 1, 3, 8, 16):
        found = controller(flat(0.05), flat(0.0001), Clock(), most)
        assert found.choose(drafting(0.98), situation()) == most


@pytest.mark.parametrize("draft", [0.0005, 0.002, 0.004])
def test_gamma_is_the_best_by_hand(draft: float) -> None:
    """Where another γ promises within a few percent of the best, either may be chosen."""
    target = StepCosts([(1, 0.02), (8, 0.022), (64, 0.09)])
    for rate in (0.5, 0.6, 0.7, 0.8, 0.9):

        def tokens_a_second(gamma: int, rate: float = rate) -> float:
            return sum(rate**i for i in range(gamma + 1)) / (target.seconds(gamma + 1) + gamma * draft)

        chosen = controller(target, flat(draft), Clock()).choose(drafting(rate), situation())
        best = max(range(MAX + 1), key=tokens_a_second)
        assert tokens_a_second(chosen) >= 0.94 * tokens_a_second(best)
        assert (chosen > 0) == (best > 0)


@pytest.mark.parametrize(
    ("row_seconds", "load", "least"), [(0.0, 1, 0.0), (0.002, 1, 0.2), (0.002, 4, 0.5), (1.0, 1, 1.0)]
)
def test_a_draft_token_must_be_as_likely_as_its_row_is_dear(row_seconds: float, load: int, least: float) -> None:
    """A row holds up every sequence, and what it brings one of them is at most a plain step."""
    target = StepCosts([(1, 0.01), (1025, 0.01 + 1024 * row_seconds)])
    for gamma in (1, 8):
        assert controller(target, flat(0.001), Clock()).least_likelihood(load, gamma) == pytest.approx(least)


def test_rounds_compete_with_what_the_target_drafts_itself() -> None:
    """Plain steps that bring S tokens: rounds of 2.5 times their length pay while they bring more than 2.5 S."""
    clock, target, draft = Clock(), flat(0.01), flat(0.005)

    def gamma_beside(num_tokens: int) -> int:
        found = controller(target, draft, clock, 3)
        for _ in range(300):
            found.observe_plain(1, 0.01, clock.now, num_tokens)
        return found.choose(drafting(0.95), situation())

    assert gamma_beside(1) == 3
    assert gamma_beside(2) == 0
    found = controller(StepCosts([(1, 0.01), (11, 0.02)]), draft, clock, 3)
    assert found.least_likelihood(1, 2) == pytest.approx(0.1)  # a millisecond a row
    for _ in range(300):
        found.observe_plain(1, 0.01, clock.now, 3)
    assert found.least_likelihood(1, 2) == pytest.approx(0.3, rel=0.02)


def test_all_sequences_of_a_worker_draft_alike_until_the_next_choice() -> None:
    clock = Clock()
    found = controller(flat(0.05), flat(0.002), clock)
    sequences = [drafting(rate) for rate in (0.9, 0.5, 0.7)]
    assert len({found.choose(each, situation(3)) for each in sequences}) == 1


@pytest.mark.parametrize(("num_came", "joins"), [(1, True), (60, False)])
def test_what_was_chosen_for_a_few_that_are_left_is_nothing_for_the_many_that_come(num_came: int, joins: bool) -> None:
    clock = Clock()
    found = controller(flat(0.05), StepCosts([(1, 0.002), (1024, 1.0)]), clock)
    found.acceptance = at(0.9)
    left = [drafting(0.9) for _ in range(4)]
    for _ in range(3):
        clock.now += 0.05
        assert all(found.choose(each, situation(4)) > 0 for each in left)
    clock.now += 0.05
    come = situation(4, num_waiting=num_came, num_prefill_tokens=60 * 600)
    assert (found.choose(drafting(0.9), come._replace(num_unseen=500)) > 0) == joins


def test_after_a_pause_nothing_that_was_chosen_before_stands() -> None:
    clock = Clock()
    found = controller(StepCosts([(1, 0.01), (2, 0.0105), (8, 0.013), (64, 0.2)]), flat(0.002), clock)
    sequence = drafting(0.9)
    assert found.choose(sequence, situation(1)) > 0
    assert found._costs._trials_at(1).running
    found._costs.plain.measure_if_older(1, -1.0, 0.0, 0.0)
    assert found.measuring
    found.leave(sequence, 100)
    clock.now += 1.0
    found.choose(drafting(0.9), situation(1, num_waiting=31, num_prefill_tokens=31 * 600))
    assert found.gamma == 0
    assert not found.measuring
    assert not found._costs._trials_at(1).running
    assert found._costs._trials_at(1).num_failed == 0


def test_while_somebody_is_there_a_pause_is_no_new_beginning() -> None:
    clock = Clock()
    found = controller(flat(0.01), flat(0.001), clock)
    sequence, other = drafting(0.9), drafting(0.9)
    assert found.choose(sequence, situation(1)) > 0
    clock.now += 5.0  # its client did not read, or its step was a long prompt's
    found.choose(other, situation(2, num_waiting=1, num_prefill_tokens=600))
    assert found.gamma > 0
    assert found._costs._trials_at(1).running


@pytest.mark.parametrize("seed", range(4))
def test_one_user_with_pauses_has_drafts_whatever_happens_now_and_then(seed: int) -> None:
    """Replies of a second; each hundredth round or step takes ten times as long, and some replies are slow at first."""
    clock, dice = Clock(), random.Random(seed)
    found = controller(flat(0.01), flat(0.001), clock)
    shares = []
    for _ in range(80):
        sequence, num_output, drafted = Drafting(found.acceptance), 0, 0
        slow = dice.random() < 0.1
        while num_output < 120:
            gamma = found.choose(sequence, Situation(1, 0, 0, 1, num_output, 300, 0.0, 0.0))
            took = (0.01 + 0.001 * gamma) * (10 if dice.random() < 0.01 else 1) * (3 if slow and num_output < 30 else 1)
            clock.now += took
            if gamma:
                accepted = next((i for i in range(gamma) if dice.random() > 0.7), gamma)
                sequence.acceptance.observe(gamma, accepted)
                found.observe_round(1, Shape(gamma), 1, took)
                num_output, drafted = num_output + accepted + 1, drafted + accepted + 1
            else:
                found.observe_plain(1, took, clock.now)
                num_output += 1
        found.leave(sequence, num_output)
        clock.now += 3.0
        shares.append(drafted / num_output)
    assert sum(shares) / len(shares) > 0.9
    assert min(sum(shares[i : i + 10]) for i in range(10, 80, 10)) > 7


def test_where_nobody_is_to_draft_a_request_may_know_it_beforehand() -> None:
    clock = Clock()
    chooser = controller(flat(0.01), flat(0.02), clock)
    assert not chooser.declines, "nothing was decided yet"
    each = drafting(0.2)
    assert chooser.choose(each, situation()) == 0
    assert chooser.declines
    better = controller(flat(0.01), flat(0.0001), clock)
    assert better.choose(drafting(0.9), situation()) > 0 or better.measuring
    assert not better.declines


def test_nothing_is_unlearnt_while_there_is_nothing_to_choose() -> None:
    """Drafting took three times what it should; ten minutes later it is not tried again for that alone."""
    clock = Clock()
    found = controller(flat(0.05), flat(0.005), clock)
    sequence = drafting(0.7)
    gammas = []
    for _ in range(200):
        gamma = found.choose(sequence, situation())
        took = 3 * (0.05 + gamma * 0.005) if gamma else 0.05
        if gamma:
            found.observe_round(1, Shape(gamma), 1, took)
        clock.now += took
        gammas.append(gamma)
    assert gammas[0] > 0
    assert gammas[-1] == 0
    found.leave(sequence, 200)
    clock.now += 600
    other = drafting(0.7)
    assert found.choose(other, situation()) == 0


def test_who_leaves_is_forgotten() -> None:
    found = controller(flat(0.05), flat(0.002), Clock())
    sequence = drafting(0.9)
    found.leave(sequence, 10)  # never here
    found.choose(sequence, situation())
    found.leave(sequence, 10)
    found.leave(sequence, 10)
    assert not found._members


def test_a_slow_round_teaches_no_more_than_a_somewhat_slow_one() -> None:
    def gamma_after(change: Callable[[GammaController], None]) -> int:
        clock = Clock()
        found = controller(flat(0.05), flat(0.002), clock)
        sequence = drafting(0.8)
        for _ in range(20):
            gamma = found.choose(sequence, situation())
            found.observe_round(1, Shape(gamma), 1, 0.05 + gamma * 0.002)
            clock.now += 0.06
        change(found)
        clock.now += 1
        return found.choose(sequence, situation())

    assert gamma_after(lambda _: None) > 0
    assert gamma_after(lambda found: found.observe_round(1, Shape(4), 1, 100.0)) > 0


def test_a_new_sequence_starts_from_those_that_draw_alike() -> None:
    """And what is known of nobody like it from all the others."""
    found = GammaController(flat(0.05), flat(0.001), MAX)
    greedy, sampled = (Drafting(found.prior(greedy=is_greedy, coupled=True)) for is_greedy in (True, False))
    for _ in range(40):
        greedy.acceptance.observe(4, 4)
        sampled.acceptance.observe(4, 1)
    started = [Drafting(found.prior(greedy=is_greedy, coupled=True)).acceptance.rate for is_greedy in (True, False)]
    assert started[0] > 0.9
    assert started[1] < 0.6
    assert found.acceptance.rate == pytest.approx(Drafting(found.prior(greedy=False, coupled=False)).acceptance.rate)
    assert started[1] < found.acceptance.rate < started[0]
