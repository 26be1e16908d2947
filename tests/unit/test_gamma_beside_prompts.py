"""What the γ controller makes of prompts beside what decodes."""

from __future__ import annotations

import pytest

from shared.policy.drafting import Drafting
from shared.policy.gamma import GammaController
from shared.policy.shape import Shape
from shared.policy.step_costs import StepCosts
from tests.support.gamma import MAX, Clock, at, controller, drafting, flat, situation


@pytest.mark.parametrize(("rate", "gamma"), [(0.98, MAX), (0.9, 5), (0.75, 2), (0.6, 1)])
def test_beside_prompts_that_fill_the_steps_no_more_is_drafted_than_is_likely_kept(rate: float, gamma: int) -> None:
    clock = Clock()
    found = controller(flat(0.05), flat(0.0001), clock)
    found.acceptance = at(rate)
    sequence, later = drafting(rate), drafting(rate)
    assert found.choose(sequence, situation(4)) > gamma or gamma == MAX
    clock.now += 30
    beside = situation(4, 1, 8, 8 * 4000)
    assert found.choose(sequence, beside) == gamma
    likely = found.acceptance.rate  # a little nearer to where it started from
    assert likely**gamma >= 0.5
    assert gamma == MAX or likely ** (gamma + 1) < 0.5
    assert found.choose(later, beside) == gamma, "who joins drafts like the others"
    assert found.choose(sequence, situation(4)) == found.choose(later, situation(4)) == found.gamma > 0


@pytest.mark.parametrize(
    ("rate", "seconds_beside", "catch_up", "joins"),
    [
        (0.9, 60, 0.05, True),
        (0.9, 60, 20.0, False),  # more than its tokens can make up for
        (0.9, 0, 0.05, False),  # hardly any of its tokens come in such steps
        (0.3, 60, 0.05, False),  # no draft token is likely enough to be kept
    ],
)
def test_who_joins_where_prompts_fill_the_steps_and_nobody_drafts_in_others(
    rate: float, seconds_beside: int, catch_up: float, joins: bool
) -> None:
    clock = Clock()
    draft = StepCosts([(1, 0.05), (1024, 0.05 + catch_up)])
    found = controller(flat(0.05), draft, clock)
    found.acceptance = at(rate)
    beside, plain = situation(4, 1, 8, 8 * 4000), situation(4, 1024)
    sequence = drafting(rate)
    assert found.choose(sequence, plain) == 0, "a draft token takes as long as a plain step"
    for _ in range(seconds_beside):
        clock.now += 1
        found.choose(sequence, beside._replace(num_unseen=100_000))  # it never joins
    clock.now += 0.01
    assert not found.measuring
    assert (found.choose(drafting(rate), beside._replace(num_unseen=1024)) > 0) == joins


@pytest.mark.parametrize(("seconds", "joins"), [(0.05, True), (0.1, False)])
def test_who_joins_beside_prompts_depends_on_whether_the_drafter_slows_plain_steps_down(
    seconds: float, joins: bool
) -> None:
    """A scout has the drafter catch up, and the plain steps meanwhile tell whether it has cores of its own."""
    clock = Clock()
    found = controller(flat(0.05), StepCosts([(1, 0.02), (1024, 0.42)]), clock)
    found.acceptance = at(0.2)
    num_scouts = 0
    for _ in range(4000):
        scout = Drafting(found.acceptance, coupled=True)
        assert found.choose(scout, situation(1, 1024)) == 0
        num_scouts += scout.num_scouting_rounds > 0
        for _ in range(16):
            took = seconds if scout.num_scouting_rounds else 0.05
            clock.now += took
            found.observe_plain(1, took, clock.now)
        while scout.num_scouting_rounds:
            scout.observe_in_shadow(scout.num_scouting_tokens, 0)
        found.leave(scout, None)
    assert num_scouts >= 4
    plain = found.plain_seconds(1)
    found.acceptance, scout = at(0.9), drafting(0.9)
    beside = situation(4, 1, 8, 8 * 4000)
    for _ in range(30):
        clock.now += 1
        found.choose(scout, beside._replace(num_unseen=100_000))  # it never joins
    clock.now += 0.01
    assert found.plain_seconds(1) == plain == pytest.approx(0.05), "what they take beside it is not what they take"
    assert (found.choose(drafting(0.9), beside._replace(num_unseen=1024)) > 0) == joins


def test_nothing_is_learnt_of_plain_steps_beside_what_others_draft_beside_prompts() -> None:
    clock = Clock()
    found = controller(flat(0.05), flat(0.0001), clock)
    found.acceptance = at(0.9)
    for _ in range(60):
        clock.now += 1
        gamma = found.choose(drafting(0.9), situation(4, 1, 8, 8 * 4000))
    assert gamma > 0
    assert found.gamma == 0
    for _ in range(40):
        clock.now += 0.2
        found.observe_plain(4, 0.2, clock.now)
    assert found.plain_seconds(4) == pytest.approx(0.05, rel=0.01)


@pytest.mark.parametrize("always", [False, True])
@pytest.mark.parametrize("gamma", [0, 2])
def test_steps_that_are_mostly_prompts_teach_only_where_there_are_few_others(gamma: int, always: bool) -> None:
    """What the prompts took is only reckoned."""
    clock = Clock()
    found = controller(flat(0.05), flat(0.005 if gamma else 0.05), clock)
    sequence = drafting(0.9 if gamma else 0.1)
    before = found._round_seconds(1, Shape(2)), found.plain_seconds(1)
    for i in range(100):
        clock.now += 0.5
        chosen = found.choose(sequence, situation(num_waiting=1 if always or i % 2 else 0))
        if found.measuring:
            found._costs.plain.give_up_measuring()
        elif gamma and chosen:
            found.observe_round(1, Shape(2), 1, 0.09, mostly_prompts=True)
        elif not gamma:
            assert chosen == 0
            found.observe_plain(1, 0.09, clock.now, mostly_prompts=True)
    after = found._round_seconds(1, Shape(2)), found.plain_seconds(1)
    assert (after != before) == always


def test_what_a_measurement_waits_for_may_be_mostly_prompts() -> None:
    clock = Clock()
    found = GammaController(flat(0.05), flat(0.02), MAX, clock)
    assert found.choose(drafting(0.6), situation(4)) == 0
    assert found.measuring
    for _ in range(20):
        clock.now += 0.05
        found.observe_plain(4, 0.05, clock.now, mostly_prompts=True)
    assert not found.measuring


def test_nobody_joins_beside_prompts_while_plain_steps_are_measured() -> None:
    clock = Clock()
    found = GammaController(flat(0.05), flat(0.02), MAX, clock)
    assert found.choose(drafting(0.6), situation(4)) == 0
    assert found.measuring
    clock.now += 0.01
    assert found.choose(drafting(0.99), situation(4, 1, 8, 8 * 4000)) == 0


def test_the_share_of_steps_that_prompts_fill_is_less_than_that_of_the_time() -> None:
    found = controller(StepCosts([(1, 0.05), (512, 0.5)]), flat(0.01), Clock())
    found._catching_up.prefill_bound.share = 0.5
    assert found._catching_up.prefill_bound_steps(1) == pytest.approx(1 / 11)
