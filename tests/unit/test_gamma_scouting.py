"""Whether drafting would pay by now, where it did not: scouts."""

from __future__ import annotations

from itertools import pairwise

import pytest

from shared.policy.drafting import Drafting
from shared.policy.shape import Shape
from tests.support.gamma import Clock, at, controller, drafting, flat, situation


def test_nothing_is_learnt_of_plain_steps_while_one_scouts_in_their_shadow() -> None:
    """Where the drafter is on the same cores, each of its rounds takes from the plain steps beside it."""
    clock = Clock()
    found = controller(flat(0.05), flat(0.04), clock)
    scout = Drafting(found.acceptance, coupled=True)
    assert found.choose(scout, situation(2)) == 0

    def plain_steps(seconds: float) -> None:
        for _ in range(40):
            clock.now += seconds
            found.observe_plain(1, seconds, clock.now)

    plain_steps(0.05)
    before = found.plain_seconds(1)
    assert scout.num_scouting_rounds > 0
    plain_steps(0.09)
    assert found.plain_seconds(1) == before
    while scout.num_scouting_rounds:
        scout.observe_in_shadow(scout.num_scouting_tokens, 0)
    plain_steps(0.09)
    assert found.plain_seconds(1) == pytest.approx(0.09, rel=0.1)


def test_a_scout_that_leaves_before_its_rounds_are_made_silences_nobody() -> None:
    clock = Clock()
    found = controller(flat(0.05), flat(0.04), clock)
    scout = Drafting(found.acceptance, coupled=True)
    assert found.choose(scout, situation(2)) == 0
    assert scout.num_scouting_rounds > 0
    found.leave(scout, None)
    for _ in range(40):
        clock.now += 0.09
        found.observe_plain(1, 0.09, clock.now)
    assert found.plain_seconds(1) == pytest.approx(0.09, rel=0.1)


def test_measuring_plain_steps_ends_though_a_sequence_was_scouting() -> None:
    """Its drafter may be away, so that it asks for nothing any more."""
    clock = Clock()
    found = controller(flat(0.05), flat(0.02), clock)
    scout, other = drafting(0.6), drafting(0.6)
    scout.num_scouting_rounds = 5
    clock.now += 60
    assert found.choose(other, situation(2)) == found.choose(scout, situation(2)) == 0
    assert found.measuring
    scout.num_scouting_rounds = 5
    for _ in range(20):
        clock.now += 0.05
        found.observe_plain(2, 0.05, clock.now)
    assert not found.measuring


def test_scouts_take_half_a_hundredth_of_the_time() -> None:
    clock = Clock()
    found = controller(flat(0.02), flat(0.004), clock)
    sequence = Drafting(found.acceptance)
    scouting = 0.0
    began = clock.now
    while clock.now - began < 600:
        gamma = found.choose(sequence, situation(num_unseen=8))
        if gamma:
            took = 0.02 + gamma * 0.004
            sequence.acceptance.observe(gamma, 0)
            found.observe_round(1, Shape(gamma), 8, took)
            if clock.now - began > 60:
                scouting += took
        else:
            took = 16 * 0.02
            found.observe_plain(1, 0.02, clock.now)
        clock.now += took
    assert 0 < scouting <= 0.01 * (clock.now - began)


def test_scouts_that_find_nothing_new_go_less_often() -> None:
    clock = Clock()
    found = controller(flat(0.02), flat(0.004), clock)
    sequence = drafting(0.1)
    began_at: list[float] = []
    while len(began_at) < 6:
        gamma = found.choose(sequence, situation(num_unseen=8))
        if gamma and (not began_at or clock.now - began_at[-1] > 1.0):
            began_at.append(clock.now)
        if gamma:
            sequence.acceptance.observe(gamma, 0)
            found.observe_round(1, Shape(gamma), 8, 0.02 + gamma * 0.004)
        clock.now += 0.05
    pauses = [after - before for before, after in pairwise(began_at)]
    assert pauses[1] == pytest.approx(2 * pauses[0], rel=0.1)
    assert pauses[2] == pytest.approx(4 * pauses[0], rel=0.1)
    assert pauses[3] == pytest.approx(pauses[2], rel=0.1)


def test_pauses_between_short_loads_earn_a_scout_no_time() -> None:
    """A tenth of a second of 1 ms steps every second: what scouts take is a share of the tenth."""
    clock = Clock()
    found = controller(flat(0.001), flat(0.0002), clock)
    num_scouts = 0
    for _ in range(300):
        sequence = Drafting(at(0.1), coupled=True)
        for _ in range(25):
            assert found.choose(sequence, situation(num_unseen=8)) == 0
            if sequence.num_scouting_rounds:
                num_scouts += 1
                sequence.num_scouting_rounds = 0
            clock.now += 0.004
        found.leave(sequence, 100)
        clock.now += 0.9
    # Ten rounds of 2 ms and two draft steps each, an eighth of a hundredth of the time once they were in vain.
    assert 0 < num_scouts * 0.024 <= 0.003 * 300 * 0.1


@pytest.mark.parametrize(
    ("steps", "taken"),
    [
        ([0.05] * 40, 10 * (2 * 0.04 + 0.002)),  # what drafting takes, where it slows nothing down
        ([0.09] * 40, 40 * 0.04),
        ([0.09] * 39 + [60.0], 39 * 0.04 + 0.05),  # one was held up by something else
        ([0.09, 0.00001] * 20, 20 * 0.04),  # the results of two came together
    ],
)
def test_what_a_scout_takes_is_what_plain_steps_beside_it_take_longer(steps: list[float], taken: float) -> None:
    """On the same cores that may be several times what its draft steps do."""
    clock = Clock()
    found = controller(flat(0.05), flat(0.04), clock)
    sent_at: list[float] = []
    scout = Drafting(found.acceptance, coupled=True)
    while len(sent_at) < 3:
        assert found.choose(scout, situation(1)) == 0
        scouts = scout.num_scouting_rounds > 0
        if scouts:
            sent_at.append(found._busy_seconds)
        for took in steps if scouts else [0.05]:
            clock.now += took
            found.observe_plain(1, took, clock.now)
            if scouts:
                assert found.choose(scout, situation(1)) == 0
        scout.num_scouting_rounds = 0
    pauses = [after - before for before, after in pairwise(sent_at)]
    assert pauses == pytest.approx([200 * taken, 400 * taken], rel=0.15)


@pytest.mark.parametrize("fresh", [True, False])
def test_nobody_scouts_while_what_all_found_is_fresh(fresh: bool) -> None:
    """One of which more is accepted than of the others has no news for them."""
    clock = Clock()
    found = controller(flat(0.05), flat(0.045), clock)
    sequences = [drafting(0.99 if i == 0 else 0.05) for i in range(8)]
    if fresh:
        for each in sequences:
            found._activate(each, situation(8))
        found.observe_round(8, Shape(2), 1, 0.12)
        for each in sequences:
            found._deactivate(each)
    began = clock.now
    while not sequences[0].num_scouting_rounds:
        assert clock.now < began + 60
        clock.now += 0.05
        for each in sequences:
            each.coupled = True
            assert found.choose(each, situation(8)) == 0
            found.observe_plain(8, 0.05, clock.now)
    assert (clock.now - began > 9) == fresh
