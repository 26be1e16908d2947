"""What catching up costs, and whom."""

from __future__ import annotations

import pytest

from shared.policy.drafting import Situation
from shared.policy.shape import Shape
from shared.policy.step_costs import StepCosts
from tests.support.gamma import Clock, controller, drafting, flat, situation


def test_catching_up_must_be_worth_it() -> None:
    """A prompt of 8,000 tokens takes the drafter 10 s; 1,000 tokens of output save more, 10 do not."""
    draft = StepCosts([(1, 0.002), (1024, 1.28)])

    def choose(num_remaining: int) -> int:
        found = controller(flat(0.05), draft, Clock())
        return found.choose(drafting(0.9), Situation(1, 0, 0, 8000, 1000, num_remaining, 0.0, 0.0))

    assert choose(10) == 0
    assert choose(1000) > 0


def test_a_sequence_decodes_on_while_the_drafter_catches_up_if_that_holds_up_no_others() -> None:
    clock = Clock()
    found = controller(flat(0.05), flat(0.01), clock)
    assert [found.steps_meanwhile(seconds, 1) for seconds in (0.02, 0.03, 0.16)] == [0, 1, 3]
    for _ in range(2):
        assert found.choose(drafting(0.95), situation(2)) > 0
    seconds = 0.05 + 0.01 * found.gamma
    assert [found.steps_meanwhile(times * seconds, 2) for times in (0.9, 1.1, 3.9)] == [0, 1, 3], "within their rounds"


def test_nothing_is_learnt_while_the_drafter_catches_up() -> None:
    clock = Clock()
    draft = StepCosts([(1, 0.002), (1024, 1.0)])
    found = controller(flat(0.05), draft, clock)
    one, other = drafting(0.9), drafting(0.9)
    assert found.choose(one, situation(2)) > 0
    clock.now += 1
    found.choose(other, situation(2, num_unseen=500))
    clock.now += 0.4
    found.observe_round(2, Shape(4), 1, 0.4)
    assert found._costs._overhead.count(2, (4, False)) == 0.0
    clock.now += 2
    found.observe_round(2, Shape(4), 1, 0.06)
    assert found._costs._overhead.count(2, (4, False)) > 0.0


@pytest.mark.parametrize(("catch_up", "load", "goes_on"), [(0.0, 2, True), (3.0, 2, False), (3.0, 1, True)])
def test_what_each_of_several_had_to_catch_up_with_counts_while_it_drafts(
    catch_up: float, load: int, goes_on: bool
) -> None:
    """It is past, but who takes its place beside the others will have to do the same; who comes after one that is
    alone decides for itself."""
    clock = Clock()
    found = controller(flat(0.05), flat(0.005), clock)
    sequences = [drafting(0.5) for _ in range(load)]
    for sequence in sequences:
        assert found.choose(sequence, situation(load)) > 0
        assert sequence.active
        sequence.catch_up = catch_up
    gammas = set()
    for _ in range(40):
        clock.now += 0.1
        for sequence in sequences:
            found.choose(sequence, situation(load))
        gammas.add(found.gamma)
    assert (0 not in gammas) == goes_on


def test_what_a_sequence_had_to_catch_up_with_counts_when_it_begins_again() -> None:
    """Else drafting seems to cost nothing, once it has been tried, until the last of these sequences has ended."""
    clock = Clock()
    found = controller(flat(0.05), StepCosts([(1, 0.005), (1024, 0.505)]), clock)
    sequence = drafting(0.7)
    assert found.choose(sequence, situation(num_unseen=1024)) > 0
    found.leave(sequence, None)
    assert found._catching_up.cost_of_rest(sequence, situation(), 2) == pytest.approx(0.25)
    assert found.choose(sequence, situation()) > 0
    assert found._catching_up.cost_of_rest(sequence, situation(), 2) == pytest.approx(0.25)
