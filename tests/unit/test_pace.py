"""What a sequence does next, whatever a controller wants."""

from __future__ import annotations

import random
from typing import cast

import pytest

from shared.policy.drafting import Drafting, Situation
from shared.policy.gamma import GammaController
from shared.policy.pace import LEAST_GRANTED_STEPS, Move, Pace, steps_ahead
from shared.policy.shape import Shape


class Wanting:
    """A controller that wants `gamma`. A plain step takes a second, catching up what it is told."""

    def __init__(self, gamma: int = 0, catch_up: float = 0.0, num_nodes: int = 0) -> None:
        self.gamma = gamma
        self.num_nodes = num_nodes
        self.catch_up = catch_up
        self.measuring = False
        self.num_asked = 0

    def choose(self, sequence: Drafting, situation: Situation) -> int:
        self.num_asked += 1
        sequence.num_nodes = self.num_nodes
        return self.gamma

    def catch_up_seconds(self, num_unseen: int) -> float:
        return self.catch_up

    def steps_meanwhile(self, catch_up: float, load: int) -> int:
        return round(catch_up)


def move(
    pace: Pace,
    controller: Wanting | None,
    num_steps: int = 0,
    num_unseen: int = 1,
    num_remaining: int = 100,
    num_ahead: int = LEAST_GRANTED_STEPS,
    num_prefill_tokens: int = 0,
) -> Move:
    situation = Situation(4, 0, num_prefill_tokens, num_unseen, 10, num_remaining, 0.0, 0.0)
    return pace.next(cast(GammaController, controller), situation, num_steps, num_ahead)


def grants(pace: Pace, controller: Wanting | None) -> list[int]:
    return [move(pace, controller, num_steps).num_steps for num_steps in range(LEAST_GRANTED_STEPS + 1)]


@pytest.mark.parametrize("fixed", [None, Shape(0), Shape(4)])
def test_without_a_controller_steps_are_granted_before_they_run_out(fixed: Shape | None) -> None:
    given = grants(Pace(None, fixed), None)
    assert given[0] > 0
    assert set(given) == {0, LEAST_GRANTED_STEPS}
    assert given == sorted(given, reverse=True)
    assert given[1] > 0, "the worker never waits for the router"
    assert given[-1] == 0, "there are enough"
    assert not any(move(Pace(None, fixed), None, n, num_unseen=99).catch_up for n in range(9))


def test_with_a_controller_that_wants_no_drafts_it_is_the_same() -> None:
    assert grants(Pace(None, None), Wanting(0)) == grants(Pace(None, None), None)
    assert grants(Pace(None, Shape(0)), Wanting(5)) == grants(Pace(None, Shape(0)), None), (
        "nor a request that wants none"
    )


def test_while_plain_steps_are_measured_few_are_granted() -> None:
    controller = Wanting(0)
    controller.measuring = True
    assert 0 < move(Pace(None, None), controller, num_ahead=32).num_steps < LEAST_GRANTED_STEPS


def test_more_steps_are_granted_where_they_are_short_and_half_of_them_are_left_when_the_next_are() -> None:
    assert [steps_ahead(seconds) for seconds in (1e-9, 0.001, 0.0025, 0.005, 0.03, 60)] == [32, 32, 32, 20, 8, 8]
    pace = Pace(None, None)
    assert move(pace, Wanting(0), num_ahead=20) == Move(num_steps=20)
    assert [pace.enough_granted(num_steps) for num_steps in (9, 10)] == [False, True]
    assert [move(pace, Wanting(0), n, num_ahead=20).num_steps for n in (20, 10, 9)] == [0, 0, 20]


def test_however_many_steps_were_granted_a_round_waits_for_them_and_catching_up_grants_few() -> None:
    controller = Wanting(0)
    pace = Pace(None, None)
    assert move(pace, controller, num_ahead=32) == Move(num_steps=32)
    controller.gamma = 5
    moves = [move(pace, controller, n, num_unseen=4, num_ahead=32) for n in range(31, 0, -1)]
    assert moves == [Move()] * 16 + [Move(catch_up=True)] + [Move()] * 14
    assert move(pace, controller, num_ahead=32) == Move(Shape(5))
    controller.catch_up = 1e6
    granted = move(pace, controller, num_unseen=10**6, num_ahead=32).num_steps
    assert granted == LEAST_GRANTED_STEPS


def test_a_fixed_gamma_is_everyones_and_the_controller_is_not_asked() -> None:
    controller = Wanting(7)
    pace = Pace(None, Shape(3))
    for _ in range(5):
        assert move(pace, controller) == Move(Shape(3))
    assert controller.num_asked == 0


def test_a_round_begins_at_once_if_nothing_is_still_to_come() -> None:
    controller = Wanting(5)
    pace = Pace(None, None)
    assert [move(pace, controller, num_unseen=n) for n in (1, 3, 6)] == [Move(Shape(5))] * 3
    assert controller.num_asked == 3, "each time anew"


def test_a_round_wanted_waits_until_the_granted_steps_are_used_up_and_begins_once() -> None:
    controller = Wanting(5)
    pace = Pace(None, None)
    moves = [move(pace, controller, num_steps, num_unseen=4) for num_steps in (3, 2, 1)]
    assert moves == [Move(catch_up=True), Move(), Move()]
    controller.gamma = 0  # what it thinks meanwhile changes nothing
    assert move(pace, controller) == Move(Shape(5))
    assert controller.num_asked == 1
    assert move(pace, controller).shape.num_draft_tokens == 0


def test_while_the_drafter_catches_up_plain_steps_go_on() -> None:
    controller = Wanting(5, catch_up=3.2)
    pace = Pace(None, None)
    assert move(pace, controller, num_unseen=200) == Move(num_steps=3, catch_up=True)
    assert [move(pace, controller, n, num_unseen=4 - n) for n in (2, 1)] == [Move(), Move()]
    assert move(pace, controller, 0, num_unseen=4) == Move(Shape(5)), "few tokens: not waited for again"
    controller.catch_up = 1e6
    assert move(pace, controller, num_unseen=10**6) == Move(num_steps=LEAST_GRANTED_STEPS, catch_up=True), "never many"
    pace = Pace(None, None)
    controller.catch_up = 3.2
    assert move(pace, controller, 2, num_unseen=200) == Move(num_steps=1, catch_up=True), "what is there counts"


def test_a_drafter_that_has_seen_all_but_the_last_token_is_not_asked_to_catch_up() -> None:
    for num_unseen, catch_up in ((0, False), (1, False), (2, True)):
        assert move(Pace(None, Shape(4)), Wanting(), num_steps=2, num_unseen=num_unseen).catch_up is catch_up


@pytest.mark.parametrize("fixed", [None, Shape(8)])
def test_no_more_is_drafted_than_may_follow(fixed: Shape | None) -> None:
    wanted = [move(Pace(None, fixed), Wanting(8), num_remaining=n).shape.num_draft_tokens for n in (1, 2, 5, 9, 10)]
    assert wanted == [0, 1, 4, 8, 8], "one token of a round is the target's own"
    assert move(Pace(None, fixed), Wanting(8), num_remaining=1).num_steps > 0


def test_a_tree_is_cut_to_what_may_follow_and_keeps_its_branching() -> None:
    wanting = Wanting(4, num_nodes=12)
    shapes = [move(Pace(None, None), wanting, num_remaining=n).shape for n in (100, 5, 3, 2, 1)]
    assert shapes == [Shape(4, 12), Shape(4, 12), Shape(2, 6), Shape(1, 3), Shape(0)]
    assert move(Pace(None, Shape(4, 12)), Wanting(0), num_remaining=3).shape == Shape(2, 6), "the client's likewise"


def test_a_tree_whose_rows_prompts_have_taken_meanwhile_is_a_chain() -> None:
    wanting = Wanting(4, num_nodes=12)
    pace, asked = Pace(None, None), Pace(None, Shape(4, 12))
    assert move(pace, wanting, num_steps=1) == move(asked, wanting, num_steps=1) == Move()
    assert move(pace, wanting, num_prefill_tokens=10_000) == Move(Shape(4))
    assert move(asked, wanting, num_prefill_tokens=10_000) == Move(Shape(4, 12)), "but for who asked for it"


def test_a_round_wanted_is_given_up_with_the_drafter() -> None:
    controller = Wanting(5)
    pace = Pace(None, None)
    assert move(pace, controller, 3) == Move()
    assert move(pace, None, 1).num_steps > 0
    controller.gamma = 2
    assert move(pace, controller) == Move(Shape(2)), "the controller is asked anew"


def test_a_round_wanted_gives_way_to_a_measurement() -> None:
    """Its drafter, maybe on the same cores, would be at work beside the plain steps."""
    controller = Wanting(5)
    pace = Pace(None, None)
    assert move(pace, controller, 3, num_unseen=4) == Move(catch_up=True)
    controller.gamma, controller.measuring = 0, True
    assert move(pace, controller, 1) == Move(num_steps=6)
    assert move(pace, controller) == Move(num_steps=6)
    controller.gamma, controller.measuring = 5, False
    assert move(pace, controller) == Move(Shape(5))


@pytest.mark.parametrize("seed", range(100))
def test_every_way_through_a_sequence_ends_and_keeps_the_rules(seed: int) -> None:
    """Against a controller that wants, and a drafter that comes and goes, as the dice say."""
    dice = random.Random(seed)
    controller = Wanting()
    max_tokens = dice.randint(1, 300)
    fixed = dice.choice([None, None, Shape(0), Shape(1), Shape(8)])
    num_ahead = dice.randint(LEAST_GRANTED_STEPS, 32)
    pace = Pace(None, fixed)
    num_output, num_seen, num_steps = 1, 0, 0
    catch_ups = 0  # since the last decision
    num_asked = drafting = 0
    while num_output < max_tokens:
        controller.gamma = dice.choice([0, 0, 1, 4, 8])
        controller.catch_up = dice.choice([0.0, 0.3, 2.0, 50.0])
        controller.measuring = dice.random() < 0.1
        present = dice.random() < 0.95
        remaining, unseen = max_tokens - num_output, num_output + 100 - num_seen
        chosen = move(pace, controller if present else None, num_steps, unseen, remaining, num_ahead)
        if controller.num_asked > num_asked:
            assert controller.num_asked == num_asked + 1
            num_asked, catch_ups, drafting = controller.num_asked, 0, controller.gamma
        elif chosen.num_steps > 0 and not present:
            catch_ups = drafting = 0
        assert chosen.num_steps >= 0
        assert chosen.shape.num_draft_tokens >= 0
        assert num_steps + chosen.num_steps <= 1.5 * num_ahead
        catch_ups += chosen.catch_up
        if chosen.catch_up:
            assert present
            assert unseen > 1
            num_seen = num_output + 100 - 1
        if chosen.shape.num_draft_tokens:
            assert present
            assert (num_steps, chosen.num_steps, chosen.catch_up) == (0, 0, False)
            assert chosen.shape.num_draft_tokens == min(
                drafting if fixed is None else fixed.num_draft_tokens, remaining - 1
            )
            num_seen = num_output + 100
            num_output += dice.randint(1, chosen.shape.num_draft_tokens + 1)
            catch_ups = drafting = 0
        else:
            num_steps += chosen.num_steps
            assert num_steps > 0, "nobody would ever speak again"
            num_steps -= 1
            num_output += 1
        assert catch_ups <= 1
    assert num_output == max_tokens
