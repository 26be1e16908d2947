"""Which plain steps are looked at, and what one took that several sequences tell of."""

from __future__ import annotations

import math
from typing import NamedTuple

# One in so many seconds, by so many of its sequences: looking at each result of each would cost steps of milliseconds
# percents.
_SECONDS_APART = 0.02
_LOOKS = 3


class PlainStep(NamedTuple):
    """A plain decode step among `load` sequences, whose results were `received` then."""

    load: int
    seconds: float
    received: float


class StepLooks:
    """The latest step that was looked at. A sequence that was not in the one before waited for that, too: of what they
    say of a step the least is believed."""

    def __init__(self) -> None:
        # Between these nothing that comes is of use.
        self.quiet_from = self.quiet_until = -math.inf
        self._latest: PlainStep | None = None
        self._num_looks = 0

    def wake(self) -> None:
        """From now on those of every step are of use."""
        self.quiet_until = -math.inf

    def wants(self, received: float, each: bool) -> bool:
        """Whether one more result that came then is of use; `each`: those of every step are."""
        step = self._latest
        if step is None or each:
            return True
        if received == step.received:
            return self._num_looks < _LOOKS
        return not step.received < received < step.received + _SECONDS_APART

    def add(self, load: int, seconds: float, received: float, each: bool) -> PlainStep | None:
        """It took one of its sequences that long. Returns the step before if there was one of which this is no more:
        nothing else will be said of it. `each`: as above."""
        step = self._latest
        if step is not None and received <= step.received:
            self._num_looks += 1
            if self._num_looks == _LOOKS:
                self.quiet_from = math.nextafter(step.received, -math.inf)
            if seconds < step.seconds:
                self._latest = PlainStep(step.load, seconds, step.received)
            return None
        self._latest, self._num_looks = PlainStep(load, seconds, received), 1
        self.quiet_from, self.quiet_until = received, -math.inf if each else received + _SECONDS_APART
        return step
