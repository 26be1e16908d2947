"""Whether to wait a moment for drafts that are on their way, so that they are verified in one step."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable

# How much an absence counts against those before it, and how many times as long as usual one may be for that.
_WEIGHT = 0.2
_MOST_TIMES = 4.0
# A draft is waited for until it is late by this share of the usual absence.
_LATENESS = 0.5
# What is due within this share of the usual absence is due now.
_AT_ONCE = 0.01
# Steps that one loses which misses a step: it is out of phase from then on, not for that step alone, and two halves
# that take turns on the same cores hold each other up.
_STEPS_LOST = 4.0


class Gathering:
    """Sequences whose round has ended come back with their next draft, all after much the same time.

    Where weights are read from memory, a step costs nearly the same for one sequence as for all. If it
    began with those few that are ready (a prompt, a plain decode, a draft that came late), the others
    would miss it, and from then on every round would take two steps. So the step waits for them while that
    costs less than it saves: those away lose steps, those ready the wait.

    Belongs to one thread. `clock`: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._away: dict[Hashable, float] = {}  # since when
        self._usual = 0.0

    def left(self, sequence: Hashable) -> None:
        """Its round ended; the drafter is asked for its next draft now."""
        self._away[sequence] = self._clock()

    def returned(self, sequence: Hashable) -> None:
        """Its next draft is here, or word that it goes on without."""
        since = self._away.pop(sequence, None)
        if since is not None:
            absence = self._clock() - since
            if self._usual == 0.0:
                self._usual = absence
            self._usual += _WEIGHT * (min(absence, _MOST_TIMES * self._usual) - self._usual)

    def forget(self, sequence: Hashable) -> None:
        """It ended, or was lost."""
        self._away.pop(sequence, None)

    @property
    def any_away(self) -> bool:
        return bool(self._away)

    def seconds_to_wait(self, num_ready: int, step_seconds: float) -> float:
        """How long the next step, of `num_ready` sequences and about `step_seconds`, should wait; 0: not at all."""
        if num_ready == 0:
            return 0.0
        now, patience = self._clock(), (1 + _LATENESS) * self._usual
        left = [since + patience - now for since in self._away.values() if since + patience > now]
        wait = max(left, default=0.0)
        # Until the last is due, as usual; for one already late the rest of patience is all that is known.
        until_due = wait - _LATENESS * self._usual
        if until_due > _AT_ONCE * self._usual:
            wait = until_due
        return wait if _STEPS_LOST * len(left) * step_seconds > num_ready * wait else 0.0
