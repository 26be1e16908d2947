"""When γ, or any drafting, is tried, and what becomes of trials."""

from __future__ import annotations

import random

import pytest

from shared.policy.acceptance import expected_tokens
from shared.policy.drafting import Drafting, Situation
from shared.policy.gamma import GammaController
from shared.policy.shape import Shape
from shared.policy.step_costs import StepCosts
from tests.support.gamma import Clock, at, controller, drafting, flat, pass_one, situation


@pytest.mark.parametrize(("num_remaining", "begins"), [(4, False), (24, False), (400, True)])
def test_rounds_are_not_tried_where_they_end_before_they_tell(num_remaining: int, begins: bool) -> None:
    """They promise little, and were never tried."""
    found = controller(flat(0.01), flat(0.0092), Clock())
    where = situation()._replace(num_remaining=num_remaining)
    assert 1.0 < found._costs.gain(1, Shape(1), 1.95, 100.0, 0.0, 0.0) < 1.03
    found.choose(drafting(0.95), where)
    assert (found.gamma > 0) == begins


@pytest.mark.parametrize(("num_waiting", "begins"), [(0, True), (12, False)])
def test_what_failed_for_many_is_not_tried_while_they_arrive(num_waiting: int, begins: bool) -> None:
    """It was never tried for those that are there by now."""
    found = controller(flat(0.05), flat(0.024), Clock())
    trials = found._costs.trials(32)
    for _ in range(3):
        trials.go_on(0.0, 0.9)
        trials.observe_round(0.0, (5, 4), 0.05, 0.1, 1.0)
        trials.end(0.0, 0.0)
    found.choose(drafting(0.75), situation(20, num_waiting=num_waiting))
    assert (found.gamma > 0) == begins


def test_who_has_short_replies_is_tried_with_too_after_some_of_them() -> None:
    """Drafting would bring an eighth more, and each reply is over before that were known."""
    clock = Clock()
    found = controller(flat(0.05), flat(0.025), clock)
    shares = []
    for _ in range(80):
        sequence = Drafting(found.acceptance, coupled=True)
        sequence.acceptance = at(0.7)
        num_output, drafted = 1.0, 0.0
        while num_output < 24:
            where = situation()._replace(num_output=int(num_output), num_remaining=24 - int(num_output))
            gamma = found.choose(sequence, where)
            took, tokens = 0.05 + gamma * 0.025, expected_tokens(0.7, gamma)
            clock.now += took
            if gamma:
                found.observe_round(1, Shape(gamma), 1, took)
            else:
                found.observe_plain(1, took, clock.now)
            num_output += tokens
            drafted += tokens if gamma else 0.0
        found.leave(sequence, 24)
        shares.append(drafted / 24)
    assert shares[0] == 0.0
    assert sum(shares[-20:]) > 15


def test_before_drafting_ends_a_smaller_gamma_that_was_never_tried_gets_its_chance() -> None:
    """Verifying more than a few tokens takes far longer than was measured at warm-up; verifying two does not."""
    clock = Clock()
    found = controller(flat(0.05), flat(0.002), clock)
    sequence = drafting(0.7)
    gammas = []
    for _ in range(300):
        gamma = found.choose(sequence, situation())
        pass_one(found, clock, gamma, (0.05, 0.052, 0.25)[min(gamma, 2)])
        gammas.append(gamma)
    assert gammas[0] > 1
    assert gammas[-50:] == [1] * 50


@pytest.mark.parametrize("bad", [0.06, 0.065, 0.07])
def test_the_next_smaller_gamma_is_tried_again_after_long(bad: float) -> None:
    """Both seem to bring much the same, or the larger up to 20 percent more, but the smaller had met a bad moment."""
    clock = Clock()
    found = controller(flat(0.05), flat(0.002), clock)
    sequence = drafting(0.8)
    gammas: list[int] = []
    for _ in range(1500):
        gamma = found.choose(sequence, situation())
        pass_one(found, clock, gamma, (0.05, bad if gammas.count(1) < 5 else 0.05, 0.0775, 0.25)[min(gamma, 3)])
        gammas.append(gamma)
    assert 2 in gammas[:200]
    assert gammas[-1] == 1


@pytest.mark.parametrize(
    ("times", "transport"), [(1.5, 0.0), (2.0, 0.0), (1.0, 0.0007), (1.0, 0.001), (1.0, 0.004), (1.2, 0.0005)]
)
def test_a_trial_that_is_in_vain_takes_few_rounds(times: float, transport: float) -> None:
    """Rounds of every γ take so many times what steps at warm-up say, and so much more."""
    clock = Clock()
    found = controller(flat(0.001), flat(0.0002), clock)
    sequences = [drafting(0.6) for _ in range(8)]
    num_rounds = 0
    for _ in range(2000):
        gammas = [found.choose(each, situation(8)) for each in sequences]
        took = times * (0.001 + max(gammas) * 0.0002) + transport if any(gammas) else 0.001
        clock.now += took
        for gamma in gammas:
            if gamma:
                found.observe_round(8, Shape(gamma), 1, took)
            else:
                found.observe_plain(8, took, clock.now)
        num_rounds += any(gammas)
    assert 0 < num_rounds <= 14, "those that tell, and a few of the smallest γ"


def test_drafting_that_was_in_vain_begins_again_only_for_more() -> None:
    clock = Clock()
    found = controller(flat(0.05), flat(0.005), clock)
    untried = found._beginning.gain(1, found._busy_seconds)
    found._costs._overhead.observe(1, (1, False), 0.055, 0.055, 1.0)
    before = found._beginning.gain(1, found._busy_seconds)
    assert before > untried == 1.0, "what rounds take is not known before there were any"
    trials = found._costs._trials_at(1)
    for _ in range(3):
        trials.go_on(found._busy_seconds, 0.9)
        trials.observe_round(found._busy_seconds, (0, 4), 0.05, 0.1, 1.0)
        trials.end(found._busy_seconds, 0.0)
    assert found._beginning.gain(1, found._busy_seconds) == pytest.approx(before + 3 * 0.08)
    found._busy_seconds += 5000
    assert found._beginning.gain(1, found._busy_seconds) == pytest.approx(before, abs=0.01), "not for ever"


def test_drafting_that_ends_for_a_load_never_drafted_at_was_not_in_vain_at_the_load_before() -> None:
    clock = Clock()
    costs = StepCosts([(1, 0.05), (2, 0.05), (4, 0.05), (64, 0.05), (128, 0.1), (512, 0.4)])
    found = controller(costs, flat(0.005), clock)
    sequence = drafting(0.7)
    draft_for(found, clock, sequence, 5.0, tokens_a_round=3)
    assert found.gamma > 0
    leave_for_load_never_drafted_at(found, clock, sequence)
    assert found._costs._trials_at(1).num_failed == 0
    assert not found._costs._trials_at(1).running


@pytest.mark.parametrize(("tokens_a_round", "in_vain"), [(1, True), (3, False)])
def test_drafting_that_brought_little_in_all_was_in_vain_though_its_rounds_are_as_short_as_promised(
    tokens_a_round: int, in_vain: bool
) -> None:
    """Whatever it was: what catching up takes is only reckoned, and who catches up has no rounds."""
    clock = Clock()
    costs = StepCosts([(1, 0.05), (2, 0.05), (4, 0.05), (64, 0.05), (128, 0.1), (512, 0.4)])
    found = controller(costs, flat(0.005), clock)
    sequence = drafting(0.7)
    draft_for(found, clock, sequence, 40.0, tokens_a_round)
    asked = found._beginning.gain(1, found._busy_seconds)
    leave_for_load_never_drafted_at(found, clock, sequence)
    assert found._costs._trials_at(1).num_failed == in_vain
    assert (found._beginning.gain(1, found._busy_seconds) > asked) == in_vain


@pytest.mark.parametrize(("prefill_seconds", "num_others"), [(0.01, 0), (0.0, 1)])
def test_what_came_beside_prompts_or_others_that_never_draft_says_nothing_of_what_rounds_bring(
    prefill_seconds: float, num_others: int
) -> None:
    clock = Clock()
    found = controller(flat(0.05), flat(0.005), clock)
    sequence = drafting(0.7)
    draft_for(found, clock, sequence, 5.0, 1, situation(1 + num_others), prefill_seconds)
    assert found.gamma > 0
    assert found._costs.trials(1 + num_others)._took == 0


@pytest.mark.parametrize("draft_seconds", [0.012, 0.016])
def test_short_replies_are_drafted_though_each_of_them_says_little(draft_seconds: float) -> None:
    """One client with pauses, to whom rounds bring 1.3 or 1.2 times as much: in some replies by chance less than plain
    steps would."""
    clock, dice = Clock(), random.Random(5)
    found = controller(flat(0.05), flat(draft_seconds), clock, most=4)
    num_drafted = 0
    for _ in range(200):
        sequence, now, num_rounds = Drafting(found.prior(greedy=True, coupled=False)), situation(), 0
        now = now._replace(num_output=1, received=clock.now)
        while now.num_output < 24:
            gamma = found.choose(sequence, now)
            took = (0.05 + gamma * draft_seconds) * dice.lognormvariate(0, 0.05)
            accepted = next((i for i in range(gamma) if dice.random() > 0.6), gamma)
            num_rounds += gamma > 0
            if gamma:
                sequence.acceptance.observe(gamma, accepted)
            pass_one(found, clock, gamma, took)
            now = now._replace(num_output=min(24, now.num_output + accepted + 1), received=clock.now)
        found.leave(sequence, 24)
        num_drafted += num_rounds > 2
        clock.now += 5.0
    assert num_drafted > 190


def draft_for(
    found: GammaController,
    clock: Clock,
    sequence: Drafting,
    seconds: float,
    tokens_a_round: int,
    where: Situation | None = None,
    prefill_seconds: float = 0.0,
) -> None:
    """A sequence has rounds for so long, each of which brings it so many tokens. Prompts take `prefill_seconds` of each
    step."""
    until, now = clock.now + seconds, where or situation()
    while clock.now < until:
        gamma = found.choose(sequence, now)
        clock.now += 0.05 + gamma * 0.005
        if gamma:
            found.observe_round(now.load, Shape(gamma), 1, 0.05 + gamma * 0.005)
        else:
            found.observe_plain(now.load, 0.05, clock.now)
        num_output = now.num_output + (tokens_a_round if gamma else 1)
        in_all = now.prefill_seconds + prefill_seconds
        now = now._replace(num_output=num_output, received=clock.now, prefill_seconds=in_all)


def leave_for_load_never_drafted_at(found: GammaController, clock: Clock, sequence: Drafting) -> None:
    """Many come, among whom drafting does not pay."""
    others = [drafting(0.7) for _ in range(63)]
    while found.gamma > 0:
        clock.now += 0.05
        for each in (sequence, *others):
            found.choose(each, situation(64))
            found.observe_plain(64, 0.05, clock.now)
