"""How a target that drafts for itself tries what it may do, against a worker of arithmetic."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from shared.policy.self_drafting import SelfDraftingPolicy
from shared.policy.step_costs import StepCosts
from shared.policy.ways import Way
from tests.support.step_costs import flat


def test_a_trial_ends_whatever_is_seen_of_it() -> None:
    """Where steps say nothing, as others' prompts are in them: it comes to nothing then."""
    policy = SelfDraftingPolicy(flat())
    for _ in range(20):
        policy.observe(1, Way.TREE, 2, 0.02)
    chosen = [policy.way(1).drafts for _ in range(100)]
    assert chosen == [False] * 65 + [True] * 35


@pytest.mark.parametrize(("seconds", "num"), [(0.5, 8), (0.01, 10), (0.0045, 22), (0.0025, 32), (0.0011, 32)])
def test_short_steps_are_tried_for_longer_and_in_turns(seconds: float, num: int) -> None:
    policy, gone = SelfDraftingPolicy(StepCosts([(1, seconds)])), []
    for _ in range(8 * num):
        gone.append(policy.way(1))
        policy.observe(1, gone[-1], 3 if gone[-1].drafts else 2, seconds)
    turns = [(way, len(list(steps))) for way, steps in itertools.groupby(gone)]
    first = next(i for i, (way, _) in enumerate(turns) if way is Way.CHAIN)
    trial, second = turns[1:first], turns[first : first + len(turns[1:first])]
    assert turns[0] == (Way.TREE, 8)
    # All but the first step of either, and those that begin within its first 6 ms, count, and it ends as soon as both
    # have enough.
    settling = math.ceil(0.006 / seconds)
    for tried, steps in (Way.PLAIN, trial), (Way.CHAIN, second):
        assert all(way is (Way.TREE if i % 2 else tried) for i, (way, _) in enumerate(steps))
        lengths = [max(3, math.ceil((0.024 if way.drafts else 0.012) / seconds)) for way, _ in steps]
        assert [length for _, length in steps[:-1]] == lengths[:-1], "drafts for longer"
    made = [sum(length for way, length in trial if way is each) for each in (Way.PLAIN, Way.TREE)]
    assert min(made) == num + settling


def test_a_step_behind_one_of_the_other_way_does_not_count() -> None:
    """It takes in what that one brought: here four times as long as it takes itself."""
    policy, latest, gone = SelfDraftingPolicy(flat(0.001)), Way.TREE, list[Way]()
    for _ in range(1000):
        way = policy.way(1)
        took = 0.0015 if way.drafts else 0.005 if latest.drafts else 0.001
        policy.observe(1, way, 1, took)
        latest = way
        gone.append(way)
    assert gone[100:].count(Way.PLAIN) > 0.9 * 900


def test_plain_steps_are_measured_once_they_have_settled() -> None:
    """As measured of a tiny target: the first behind a round takes 1.6 times as long as others, the next two 1.25
    times, which drafts would otherwise seem to be worth."""
    policy, num_plain, gone = SelfDraftingPolicy(flat(0.0013)), 3, list[Way]()
    for _ in range(4000):
        gone.append(policy.way(1))
        if gone[-1].drafts:
            policy.observe(1, gone[-1], 2, 0.003)
            num_plain = 0
        else:
            policy.observe(1, Way.PLAIN, 1, 0.0013 * (1.6, 1.25, 1.25, 1.0)[num_plain])
            num_plain = min(num_plain + 1, 3)
    assert gone[500:].count(Way.PLAIN) > 0.9 * 3500


def test_what_is_hopeless_is_not_tried_to_the_end() -> None:
    """Drafts that bring a third of what plain decoding does: some 10 of each way say it, not 32."""
    policy, gone = SelfDraftingPolicy(flat(0.0013)), list[Way]()
    for _ in range(400):
        gone.append(policy.way(1))
        policy.observe(1, gone[-1], 1, 0.004 if gone[-1].drafts else 0.0013)
    assert 0 < gone.count(Way.CHAIN) < 20
    assert gone.count(Way.TREE) < 30


def test_prompts_that_are_hard_do_not_decide_between_ways() -> None:
    """Chains bring a fifth more than trees, and texts of some 40 steps four times as much as others: the share of the
    steps behind the first 1000 that are made in chains."""
    rng, num_chains = random.Random(1), 0
    for _ in range(20):
        policy, luck = SelfDraftingPolicy(flat(0.001)), 1.0
        for step in range(3000):
            if step % 40 == 0:
                luck = rng.choice([1.0, 4.0])
            way = policy.way(1)
            took = {Way.PLAIN: 0.001, Way.CHAIN: 0.0025, Way.TREE: 0.003}[way]
            policy.observe(1, way, round(luck * rng.choice([1, 3])) if way.drafts else 1, took)
            num_chains += step >= 1000 and way is Way.CHAIN
    assert num_chains > 0.7 * 20 * 2000


def test_steps_that_say_nothing_are_no_trial() -> None:
    policy = SelfDraftingPolicy(flat())
    for _ in range(20):
        policy.observe(1, Way.TREE, 2, 0.01)
    assert not any(policy.way(1).drafts for _ in range(30))  # a long prompt is in all of them
    while (way := policy.way(1)) is not Way.CHAIN:  # which was not tried yet
        policy.observe(1, way, 2 if way.drafts else 3, 0.01)  # and in these it turns out that plain steps are better
    gone = []
    for _ in range(1000):
        gone.append(policy.way(1))
        policy.observe(1, gone[-1], 2 if gone[-1].drafts else 3, 0.01)
    assert gone.count(Way.PLAIN) > 950


@pytest.mark.parametrize("stall", [1.0, 60.0, 3600.0])
@pytest.mark.parametrize("at", [0, 3, 12, 30])
@pytest.mark.parametrize("gain", [0.3, 3.0])
def test_a_machine_that_stands_still_for_a_moment_decides_nothing(gain: float, at: int, stall: float) -> None:
    policy = SelfDraftingPolicy(flat())
    right = 0
    for step in range(1000):
        way = policy.way(1)
        right += way.drafts == (gain > 1)
        took = (0.02 / gain if way.drafts else 0.01) + (stall if step == at else 0)
        policy.observe(1, way, 2 if way.drafts else 1, took)
    assert right > 850


@pytest.mark.parametrize("stall", [0.02, 60.0])
@pytest.mark.parametrize("seconds", [0.0025, 0.0045, 0.0055, 0.01])
@pytest.mark.parametrize("gain", [0.6, 0.8, 1.25])
def test_nor_does_it_where_few_steps_of_a_trial_are_measured(gain: float, seconds: float, stall: float) -> None:
    """Wherever in the first trials it does, hardly more of ten seconds is lost than without: what they say hangs on one
    step, so that they are soon held again."""

    def wrong_share(at: int) -> float:
        policy, wrong, passed, step = SelfDraftingPolicy(flat(seconds)), 0.0, 0.0, 0
        while passed < 10.0:
            way = policy.way(1)
            took = 2 * seconds / gain if way.drafts else seconds
            passed += took
            wrong += took if way.drafts != (gain > 1) else 0.0
            policy.observe(1, way, 2 if way.drafts else 1, took + (stall if step == at else 0.0))
            step += 1
        return wrong / passed

    assert max(map(wrong_share, range(90))) < wrong_share(-1) + 0.1


def serve_at_two_speeds(gain: float, seconds: float, seed: int) -> float:
    """The share of steps with drafts, of such a worker whose machine takes twice as long from time to time."""
    policy, rng = SelfDraftingPolicy(flat()), random.Random(seed)
    speed, num_drafted, num_steps = 1.0, 0, 6000
    for step in range(-500, num_steps):
        if rng.random() < 1 / 250:
            speed = 3 - speed
        way = policy.way(1)
        took = (seconds if way.drafts else 0.01) * speed * rng.lognormvariate(0, 0.1)
        policy.observe(1, way, int(gain) + (rng.random() < gain % 1) if way.drafts else 1, took)
        num_drafted += way.drafts and step >= 0
    return num_drafted / num_steps


@pytest.mark.parametrize(("gain", "seconds", "least", "most"), [(1.3, 0.0153, 0.0, 0.06), (2.0, 0.016, 0.93, 1.0)])
def test_the_better_way_is_gone_on_a_machine_whose_speed_changes(
    gain: float, seconds: float, least: float, most: float
) -> None:
    """What either way brought at another time says nothing."""
    assert least <= sum(serve_at_two_speeds(gain, seconds, seed) for seed in range(20)) / 20 <= most
