"""How much the drafter's work slows the target worker down: whether they share their cores is for nobody to say."""

from __future__ import annotations

import math

# Catching up may take so many times as long as it should, where they share their cores.
SAME_CORES = 2.0
# How much a plain step beside it counts against those before.
_WEIGHT = 0.2


class Interference:
    """When the drafter catches up with a sequence, or scouts, and how many times longer plain steps take meanwhile.

    Every step beside it tells the two cases apart: on cores of its own the drafter slows nothing down, on the same
    ones everything takes twice as long. That it shares them is believed first. Times are seconds of the caller's clock.
    """

    def __init__(self) -> None:
        self.slowdown = SAME_CORES
        # When it is over at the latest.
        self.over_at = -math.inf
        # When it is going on at the least.
        self._from = self._until = -math.inf

    def begin(self, now: float, seconds: float) -> None:
        """The drafter is at work for so long if nothing holds it up, behind what it is still at."""
        self._from = max(self.over_at, now)
        self._until = self._from + seconds
        self.over_at = self._from + SAME_CORES * seconds

    def go_on(self, until: float) -> None:
        """It is still at work then."""
        self.over_at = max(self.over_at, until)

    def observe(self, began: float, ended: float, times_longer: float) -> None:
        """A plain step took so many times longer than without it."""
        if self._from <= began and ended <= self._until:
            self.slowdown += _WEIGHT * (min(max(times_longer, 1.0), SAME_CORES) - self.slowdown)
