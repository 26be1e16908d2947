"""Plain steps where nobody drafts, against those that are made in turns with drafts."""

from __future__ import annotations

from typing import Final

from shared.policy.goodput import Goodput

# In turns with drafts they take longer: they find less in the caches, and the drafter takes in what they bring. Before
# any comparison so many times as long; of one so many times as long, or as short, is believed at most; and it counts so
# much against those before it.
_USUAL: Final = 1.04
_MOST: Final = 1.5
_WEIGHT: Final = 0.3
# With so many that nobody drafted beside, or more.
_LEAST_STEPS: Final = 8


class Rest:
    """How much longer plain steps take in turns with drafts than on their own. What the two bring must not be told by
    the former: of a tiny target, whose trees bring 0.95 of what plain steps on their own do, they took 1.09 times as
    long."""

    def __init__(self) -> None:
        self._mean = _USUAL
        self._num_compared = 1
        self._alone = Goodput()

    @property
    def times(self) -> float:
        return max(1.0, self._mean)

    def observe(self, seconds: float, waited: float, num_steps: int) -> None:
        """So many on their own took so long in all."""
        self._alone.observe(num_steps, seconds, waited, num_steps)

    def compare(self, seconds: float) -> None:
        """In turns with drafts one took so long on average, and soon before that some were on their own."""
        alone = self._alone.seconds_apart
        if self._alone.num_seen < _LEAST_STEPS or alone <= 0:
            return
        self._num_compared += 1
        times = min(max(seconds / alone, 1 / _MOST), _MOST)
        self._mean += max(_WEIGHT, 1 / self._num_compared) * (times - self._mean)

    def end(self) -> None:
        """None is on its own any more: a machine is faster or slower from one minute to the next."""
        self._alone = Goodput()
