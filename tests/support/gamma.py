"""What tests of the γ controller make: machines, sequences, and controllers that know them."""

from __future__ import annotations

from shared.policy.acceptance import Acceptance
from shared.policy.drafting import Drafting, Situation
from shared.policy.gamma import GammaController
from shared.policy.shape import Shape
from shared.policy.step_costs import StepCosts

MAX = 8


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def flat(seconds: float) -> StepCosts:
    return StepCosts([(1, seconds), (1024, seconds)])


def situation(load: int = 1, num_unseen: int = 1, num_waiting: int = 0, num_prefill_tokens: int = 0) -> Situation:
    return Situation(load, num_waiting, num_prefill_tokens, num_unseen, 64, 1000, 0.0, 0.0)


def controller(target: StepCosts, draft: StepCosts, clock: Clock, most: int = MAX) -> GammaController:
    """One that has just measured plain steps of a single sequence, and found them as they should be."""
    found = GammaController(target, draft, most, clock)
    for i in range(8):
        found.observe_plain(1, target.seconds(1), clock.now - 8 + i)
    return found


def pass_one(found: GammaController, clock: Clock, gamma: int, took: float) -> None:
    """A single sequence has a round of γ draft tokens, or with none a plain step, that takes so long."""
    clock.now += took
    if gamma:
        found.observe_round(1, Shape(gamma), 1, took)
    else:
        found.observe_plain(1, took, clock.now)


def at(rate: float) -> Acceptance:
    """An acceptance rate of which much has been seen."""
    found = Acceptance()
    for _ in range(100):
        found.observe(1000, round(1000 * rate))
        found._num_examined, found._num_accepted = 256.0, 256.0 * rate
    return found


def drafting(rate: float) -> Drafting:
    found = Drafting()
    found.acceptance = at(rate)
    return found
