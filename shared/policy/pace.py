"""What a sequence does next: a round, plain steps, or having its drafter catch up meanwhile."""

from __future__ import annotations

from typing import NamedTuple

from shared.policy.acceptance import Acceptance
from shared.policy.drafting import Drafting, Situation
from shared.policy.gamma import GammaController
from shared.policy.shape import PLAIN, Shape

# Plain decoding: seconds that a worker may run ahead, in steps, but so few of them at least and so many at most; more
# are granted when half of them are left. Enough that the worker never waits for the router, and that asking for more
# takes little beside steps of a millisecond; little enough that a change to drafting is not long in coming.
_GRANTED_SECONDS = 0.1
LEAST_GRANTED_STEPS = 8
_MOST_GRANTED_STEPS = 32
# The same while it is measured what plain steps take: rounds are to follow.
_MEASURED_STEPS = 6


class Move(NamedTuple):
    """A round of this `shape` now, if it is not plain. Else `num_steps` more plain steps are granted (maybe none:
    enough are), and with `catch_up` the drafter takes in what it has not seen."""

    shape: Shape = PLAIN
    num_steps: int = 0
    catch_up: bool = False


def steps_ahead(step_seconds: float) -> int:
    """Plain steps granted at a time where one takes so long."""
    return min(max(LEAST_GRANTED_STEPS, int(_GRANTED_SECONDS / step_seconds)), _MOST_GRANTED_STEPS)


class Pace:
    """One sequence's way between plain decoding and rounds.

    A worker that decodes ahead uses up the steps it was granted before a round can begin; the drafter
    catches up in that time.
    """

    def __init__(self, prior: Acceptance | None, fixed: Shape | None, coupled: bool = False) -> None:
        """`fixed`: the shape of every round, None to have the controller choose it; `coupled`: see Drafting."""
        self.drafting = Drafting(prior, coupled)
        self._fixed = fixed
        # What is wanted in the next round, until it begins.
        self._wanted = PLAIN
        self._refill_below = LEAST_GRANTED_STEPS // 2

    def enough_granted(self, num_steps: int) -> bool:
        """Whether there is nothing to decide yet, with so many granted steps still to come."""
        return num_steps >= self._refill_below

    def next(self, controller: GammaController | None, situation: Situation, num_steps: int, num_ahead: int) -> Move:
        """The next move, with `num_steps` granted steps still to come; without a controller, plain decoding, for
        `num_ahead` steps at a time."""
        if self.enough_granted(num_steps):
            return Move()
        fresh = self._wanted == PLAIN
        if controller is None:
            self._wanted = PLAIN
        elif fresh or controller.measuring:
            self._wanted = self._choose(controller, situation)
        wanted = self._wanted.cut_to(situation.num_remaining - 1)
        if wanted == PLAIN or controller is None:
            self._wanted = PLAIN
            measuring = controller is not None and controller.measuring
            self._refill_below = (LEAST_GRANTED_STEPS if measuring else num_ahead) // 2
            return Move(num_steps=_MEASURED_STEPS if measuring else num_ahead)
        catch_up = controller.catch_up_seconds(situation.num_unseen) if fresh else 0.0
        num_meanwhile = controller.steps_meanwhile(catch_up, situation.load)
        if num_steps == 0 and num_meanwhile <= 0:
            self._wanted = PLAIN
            # A tree that prompts have meanwhile taken the rows of is none.
            return Move(wanted.as_chain() if self._fixed is None and situation.prefill_bound else wanted)
        granted = max(0, min(num_meanwhile, LEAST_GRANTED_STEPS) - num_steps)
        return Move(num_steps=granted, catch_up=fresh and situation.num_unseen > 1)

    def _choose(self, controller: GammaController, situation: Situation) -> Shape:
        if self._fixed is not None:
            return self._fixed
        return Shape(controller.choose(self.drafting, situation), self.drafting.num_nodes)
