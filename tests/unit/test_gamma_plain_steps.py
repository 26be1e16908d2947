"""What the γ controller learns of plain steps, and when it has them measured."""

from __future__ import annotations

from itertools import pairwise

import pytest

from shared.policy.drafting import Drafting
from shared.policy.gamma import GammaController
from shared.policy.shape import Shape
from tests.support.gamma import MAX, Clock, controller, drafting, flat, pass_one, situation


def test_plain_steps_are_measured_before_rounds_begin_where_it_is_close() -> None:
    clock = Clock()
    found = GammaController(flat(0.05), flat(0.02), MAX, clock)
    sequence = drafting(0.6)
    assert found.choose(sequence, situation()) == 0
    assert found.measuring
    for _ in range(8):
        clock.now += 0.05
        found.observe_plain(1, 0.05, clock.now)
    assert not found.measuring
    assert found.choose(sequence, situation()) > 0


def test_a_sequence_that_stood_still_does_not_silence_the_others() -> None:
    clock = Clock()
    found = GammaController(flat(0.05), flat(0.02), MAX, clock)
    assert found.choose(drafting(0.6), situation(8)) == 0
    assert found.measuring
    clock.now += 30
    found.observe_plain(8, 30.0, clock.now)  # preempted before all of this began
    for _ in range(7):
        clock.now += 0.05
        for _ in range(8):
            found.observe_plain(8, 0.05, clock.now)
    assert not found.measuring
    assert found.plain_seconds(8) == pytest.approx(0.05, rel=0.01)


def test_a_plain_step_takes_what_it_took_those_that_were_in_the_one_before_too() -> None:
    """Where sequences take turns, those that sat one out say that theirs took twice as long."""
    clock = Clock()
    found = GammaController(flat(0.05), flat(0.02), MAX, clock)
    assert found.choose(drafting(0.6), situation(8)) == 0
    assert found.measuring
    for _ in range(8):
        clock.now += 0.05
        for seconds in (0.1, 0.05, 0.1):
            found.observe_plain(8, seconds, clock.now)
    assert not found.measuring
    assert found.plain_seconds(8) == pytest.approx(0.05, rel=0.01)


@pytest.mark.parametrize(("rate", "pays"), [(0.3, False), (0.95, True)])
def test_plain_steps_that_seem_to_take_longer_than_the_rounds_they_are_part_of_are_measured_again(
    rate: float, pays: bool
) -> None:
    """However much drafting promises: it is against them that it does. With a high α the rounds that are made take
    longer than the plain steps do, as it seems, and yet one of a single draft token would not."""
    clock = Clock()
    found = controller(flat(0.05), flat(0.02), clock)
    sequence = drafting(rate)
    for _ in range(8):
        clock.now += 0.15
        found.observe_plain(1, 0.15, clock.now)
    assert found.plain_seconds(1) > 0.1
    gammas = []
    for _ in range(100):
        gamma = found.choose(sequence, situation())
        pass_one(found, clock, gamma, 0.05 + gamma * 0.02)
        gammas.append(gamma)
    assert gammas[0] > 0
    assert found.plain_seconds(1) == pytest.approx(0.05, rel=0.1)
    assert (gammas[-1] > 0) == pays


def test_plain_steps_that_do_take_longer_than_rounds_are_measured_ever_less_often() -> None:
    """Kernels for one row may be slower than those for a few."""
    clock = Clock()
    found = controller(flat(0.05), flat(0.001), clock)
    sequence = drafting(0.8)
    measured_at: list[float] = []
    while clock.now < 1120:
        gamma = found.choose(sequence, situation())
        if found.measuring and (not measured_at or clock.now - measured_at[-1] > 0.5):
            measured_at.append(clock.now)
        pass_one(found, clock, gamma, 0.04 if gamma else 0.05)
    assert 3 <= len(measured_at) <= 9
    pauses = [later - earlier for earlier, later in pairwise(measured_at)]
    assert all(later > 1.5 * earlier for earlier, later in pairwise(pauses))


@pytest.mark.parametrize(("draft", "every"), [(0.02, 15), (0.0115, 20), (0.001, 60)])
def test_the_less_drafting_promises_the_more_often_plain_steps_are_measured(draft: float, every: float) -> None:
    """It promises 1.07, 1.22 and 1.47 times as much. Even where it seems sure they are measured once a minute."""
    clock = Clock()
    found = controller(flat(0.05), flat(draft), clock, 1)
    sequence = drafting(0.5)
    measured_at: list[float] = []
    while clock.now < 1200:
        gamma = found.choose(sequence, situation())
        if found.measuring and (not measured_at or clock.now - measured_at[-1] > 10):
            measured_at.append(clock.now)
        pass_one(found, clock, gamma, 0.05 + gamma * draft)
    assert len(measured_at) >= 3
    assert all(0.9 * every < later - earlier < 1.1 * every for earlier, later in pairwise(measured_at))


def test_a_plain_step_is_looked_at_by_a_few_of_its_sequences_and_the_next_ones_by_nobody() -> None:
    """Each costs the router time. Of those few, whoever was not in the step before says what it waited as well."""
    clock = Clock()
    found = controller(flat(0.05), flat(0.01), clock)
    num_looked = []
    for _ in range(90):
        clock.now += 0.004
        looked = 0
        for place in range(32):
            if not found.plain_looks.quiet_from < clock.now < found.plain_looks.quiet_until:
                looked += 1
                found.observe_plain(32, 0.03 if place == 0 else 0.004, clock.now)
        num_looked.append(looked)
    assert num_looked == [3, 0, 0, 0, 0] * 18
    assert found.plain_seconds(32) == pytest.approx(0.004, rel=0.1)


def test_plain_steps_of_a_crowds_end_do_not_make_one_sequence_draft_for_long() -> None:
    """They took more than twice as long as one alone does, beside all that ended then. Rounds, whose messages take
    longer than a step, seem to bring twice what plain decoding does, and nothing about them contradicts that."""
    clock = Clock()
    found = controller(flat(0.05), flat(0.01), clock)
    sequence = drafting(0.75)
    for _ in range(20):
        for load in (8, 8, 8, 3, 1, 1):
            clock.now += 0.12
            found.observe_plain(load, 0.12, clock.now)
    assert found.plain_seconds(1) > 0.1
    drafted = []
    for _ in range(100):
        gamma = found.choose(sequence, situation())
        pass_one(found, clock, gamma, 0.15 + gamma * 0.01 if gamma else 0.05)
        drafted.append(gamma > 0)
    assert drafted[0]
    assert sum(drafted) <= 30
    assert found.plain_seconds(1) == pytest.approx(0.05, rel=0.05)


def test_a_step_of_the_crowd_before_does_not_end_the_measurement_of_one_sequence() -> None:
    """The last plain step that was looked at is heard of when the next one is: long after, if there were rounds."""
    clock = Clock()
    found = controller(flat(0.05), flat(0.01), clock)
    for _ in range(20):
        for load in (1, 1, 8, 8, 8):
            clock.now += 0.12
            found.observe_plain(load, 0.12, clock.now)
    sequence = drafting(0.75)
    for _ in range(120):
        gamma = found.choose(sequence, situation())
        pass_one(found, clock, gamma, 0.15 + gamma * 0.01 if gamma else 0.05)
    assert found.plain_seconds(1) == pytest.approx(0.05, rel=0.05)


def test_where_the_load_changes_to_and_fro_what_was_measured_stays_known() -> None:
    clock = Clock()
    found = controller(flat(0.05), flat(0.001), clock)
    sequences = [drafting(0.9) for _ in range(6)]
    num_plain = num_all = 0
    while clock.now < 1100:
        load = 5 + int(clock.now) % 2
        gammas = [found.choose(each, situation(load)) for each in sequences[:load]]
        gamma = max(gammas)
        took = 0.05 + gamma * 0.001
        clock.now += took
        for each in gammas:
            if each:
                found.observe_round(load, Shape(each), 1, took)
            else:
                found.observe_plain(load, took, clock.now)
        num_all += 1
        num_plain += gamma == 0
    assert num_plain < 0.05 * num_all


def test_a_measurement_in_a_bad_moment_is_made_again_soon_and_then_ever_more_rarely() -> None:
    clock = Clock()
    found = controller(flat(0.05), flat(0.01), clock)
    sequence = drafting(0.9)
    measured_at: list[float] = []
    bad_until = 0.0
    while clock.now < 1200:
        gamma = found.choose(sequence, situation())
        if found.measuring and (not measured_at or clock.now - measured_at[-1] > 4):
            measured_at.append(clock.now)
            if len(measured_at) == 2:
                bad_until = clock.now + 3
        took = 0.15 + gamma * 0.01 if gamma else 0.125 if clock.now < bad_until else 0.05
        pass_one(found, clock, gamma, took)
    pauses = [later - earlier for earlier, later in pairwise(measured_at)]
    assert pauses[0] > 55
    assert pauses[1] < 20, "soon"
    assert found.plain_seconds(1) == pytest.approx(0.05, rel=0.1)
    assert len(measured_at) <= 12


def test_plain_steps_follow_the_machine_while_rounds_go_on_as_far_as_it_may_be_the_machine() -> None:
    clock = Clock()
    found = controller(flat(0.05), flat(0.005), clock, 1)
    sequence = drafting(0.9)

    def rounds(times: float) -> tuple[float, float]:
        """What is believed of a plain step and of a round when they take so many times as long for a while."""
        for _ in range(60):
            gamma = 0
            while gamma == 0:
                gamma = found.choose(sequence, situation())
                clock.now += 0.05
                if gamma == 0:
                    found.observe_plain(1, 0.05, clock.now)
            clock.now += times * (0.05 + gamma * 0.005) - 0.05
            found.observe_round(1, Shape(gamma), 1, times * (0.05 + gamma * 0.005))
        return found.plain_seconds(1), found._round_seconds(1, Shape(gamma)) / (0.05 + gamma * 0.005)

    assert rounds(1.0) == pytest.approx((0.05, 1.0), rel=0.02)
    assert rounds(1.1) == pytest.approx((0.055, 1.1), rel=0.03)
    plain, slower = rounds(3.0)
    assert slower > 1.5
    assert plain < 0.065, "it may be the drafter's alone"


def test_rounds_become_slower_with_plain_steps_where_nobody_drafts_and_while_they_go_on_as_seen() -> None:
    clock = Clock()
    found = controller(flat(0.05), flat(0.02), clock)
    sequence = drafting(0.9)
    measured = False
    while not measured or found.measuring:
        gamma = found.choose(sequence, situation())
        measured = measured or (found.measuring and clock.now > 1030)
        pass_one(found, clock, gamma, 0.05 + gamma * 0.02 if gamma else 0.06)
    assert found.plain_seconds(1) > 0.054
    seconds = 0.05 + 4 * 0.02
    assert found._round_seconds(1, Shape(4)) == pytest.approx(seconds, rel=0.01), "amid rounds, as slow as ever"

    found.leave(sequence, None)
    hopeless = drafting(0.0)
    for _ in range(100):
        clock.now += 0.12
        assert found.choose(hopeless, situation()) == 0
        found.observe_plain(1, 0.12, clock.now)
    assert found.plain_seconds(1) == pytest.approx(0.12, rel=0.05)
    assert found._round_seconds(1, Shape(4)) == pytest.approx(seconds * (0.12 + 0.08) / (0.055 + 0.08), rel=0.1)


def test_before_drafting_ends_it_is_seen_whether_plain_steps_got_slower_too() -> None:
    """The machine is three times as slow all at once: rounds seem not to pay, but plain steps are no better."""
    clock = Clock()
    found = controller(flat(0.05), flat(0.005), clock)
    sequence = drafting(0.7)
    gammas = []
    for i in range(600):
        slow = 3 if i > 200 else 1
        gamma = found.choose(sequence, situation())
        gammas.append(gamma)
        pass_one(found, clock, gamma, slow * (0.05 + gamma * 0.005))
    assert sum(gamma > 0 for gamma in gammas[210:]) > 0.85 * len(gammas[210:])
    assert gammas[-1] > 0


@pytest.mark.parametrize(("step", "least", "most"), [(0.001, 4, 5), (0.004, 18, 20), (0.024, 98, 100)])
def test_of_many_short_plain_steps_a_few_are_looked_at(
    monkeypatch: pytest.MonkeyPatch, step: float, least: int, most: int
) -> None:
    clock = Clock()
    seen: list[float] = []
    chooser = controller(flat(step), flat(step), clock)
    observe = chooser._costs.plain.observe

    def note(load: int, seconds: float, now: float, busy: float) -> bool:
        seen.append(seconds)
        return observe(load, seconds, now, busy)

    monkeypatch.setattr(chooser._costs.plain, "observe", note)
    for _ in range(100):
        clock.now += step
        # Two that were in it tell of it, one of them late.
        for seconds in (2 * step, 1.5 * step):
            chooser.observe_plain(2, seconds, clock.now)
    assert least <= len(seen) <= most
    assert chooser.plain_seconds(2) > 1.1 * step, "and learnt from"
    assert seen[1:] == [pytest.approx(1.5 * step)] * (len(seen) - 1)


def left_after_rounds(plain: float, draft: float, rate: float) -> tuple[GammaController, Clock, Drafting]:
    """A controller with the sequence that made rounds, which paid, and has just gone."""
    clock = Clock()
    found = controller(flat(plain), flat(draft), clock)
    sequence = drafting(rate)
    for _ in range(40):
        gamma = found.choose(sequence, situation())
        pass_one(found, clock, gamma, plain + gamma * draft)
    assert gamma > 0
    found.leave(sequence, 100)
    return found, clock, sequence


def test_plain_steps_of_who_does_not_draft_say_that_rounds_no_longer_pay() -> None:
    """Plain steps were last seen in a slow moment, and rounds seem to pay; a request that has chosen not to draft comes
    in between and tells."""
    found, clock, sequence = left_after_rounds(0.06, 0.02, 0.5)
    rounds = found._costs.seconds(1, found.shape, 0.0)
    for _ in range(25):
        pass_one(found, clock, 0, 0.05)
    assert found.plain_seconds(1) == pytest.approx(0.05, rel=0.03)
    assert found._costs.seconds(1, found.shape, 0.0) == pytest.approx(rounds, rel=0.02), "seen a moment ago"
    assert found.choose(sequence, situation()) == 0


def test_what_rounds_take_changes_with_later_plain_steps_of_who_does_not_draft() -> None:
    """Rounds were not seen since: it is the machine that became slower."""
    found, clock, _ = left_after_rounds(0.05, 0.005, 0.8)
    for _ in range(30):
        pass_one(found, clock, 0, 0.05)
    rounds = found._costs.seconds(1, found.shape, 0.0)
    for _ in range(60):
        pass_one(found, clock, 0, 0.07)
    assert found.plain_seconds(1) == pytest.approx(0.07, rel=0.02)
    assert found._costs.seconds(1, found.shape, 0.0) == pytest.approx(rounds + 0.02, rel=0.03)


def test_of_what_steps_bring_a_target_that_drafts_itself_who_never_drafts_says_nothing() -> None:
    """Nor of what they take: it has no drafts in them."""
    clock = Clock()
    found = GammaController(flat(0.05), flat(0.02), MAX, clock)
    for i in range(2000):
        clock.now += 0.06
        found.observe_plain(1, 0.06, clock.now, 2 if i % 2 else 1)
    brought, took = found._costs.plain.tokens(1), found.plain_seconds(1)
    assert brought == pytest.approx(1.5, rel=0.05)
    for _ in range(2000):
        clock.now += 0.05
        found.observe_plain(1, 0.05, clock.now, None)
    assert (found._costs.plain.tokens(1), found.plain_seconds(1)) == (brought, took)
