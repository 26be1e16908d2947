"""What a sequence does next: a round, plain steps, or having its drafter catch up meanwhile."""

from __future__ import annotations

from typing import NamedTuple

from shared.policy.acceptance import Acceptance
from shared.policy.gamma import Drafting, GammaController, Situation

# Plain decoding: steps a worker may run ahead, and what is left of them when more are granted. Enough that
# the worker never waits for the router; little enough that a change to drafting is not long in coming.
GRANTED_STEPS = 8
_REFILL_BELOW = 4
# The same while it is measured what plain steps take: rounds are to follow.
_MEASURED_STEPS = 6


class Move(NamedTuple):
    """`num_draft_tokens` > 0: a round of so many now. Else `num_steps` more plain steps are granted (maybe
    none: enough are), and with `catch_up` the drafter takes in what it has not seen."""

    num_draft_tokens: int = 0
    num_steps: int = 0
    catch_up: bool = False


def enough_granted(num_steps: int) -> bool:
    """Whether there is nothing to decide yet, with so many granted steps still to come."""
    return num_steps >= _REFILL_BELOW


class Pace:
    """One sequence's way between plain decoding and rounds.

    A worker that decodes ahead uses up the steps it was granted before a round can begin; the drafter
    catches up in that time.
    """

    def __init__(self, prior: Acceptance | None, fixed: int | None, in_shadow: bool = False) -> None:
        """`fixed`: draft tokens of every round, None to have the controller choose them; `in_shadow`: see Drafting."""
        self.drafting = Drafting(prior, in_shadow)
        self._fixed = fixed
        # Draft tokens wanted in the next round, until it begins.
        self._wanted = 0

    def next(self, controller: GammaController | None, situation: Situation, num_steps: int) -> Move:
        """The next move, with `num_steps` granted steps still to come; without a controller, plain decoding."""
        if enough_granted(num_steps):
            return Move()
        fresh = self._wanted == 0
        if controller is None:
            self._wanted = 0
        elif fresh or controller.measuring:
            self._wanted = controller.choose(self.drafting, situation) if self._fixed is None else self._fixed
        wanted = min(self._wanted, situation.num_remaining - 1)
        if wanted <= 0 or controller is None:
            self._wanted = 0
            measuring = controller is not None and controller.measuring
            return Move(num_steps=_MEASURED_STEPS if measuring else GRANTED_STEPS)
        catch_up = controller.catch_up_seconds(situation.num_unseen) if fresh else 0.0
        num_meanwhile = controller.steps_meanwhile(catch_up, situation.load)
        if num_steps == 0 and num_meanwhile <= 0:
            self._wanted = 0
            return Move(num_draft_tokens=wanted)
        granted = max(0, min(num_meanwhile, GRANTED_STEPS) - num_steps)
        return Move(num_steps=granted, catch_up=fresh and situation.num_unseen > 1)
