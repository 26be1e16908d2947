"""How busy a target worker is with prompts."""

from __future__ import annotations

import math

# What was so many seconds ago counts e times less than what is now.
_MEMORY_SECONDS = 5.0
# Between two loads nothing is forgotten: a longer pause counts as this one.
_LONGEST_PAUSE_SECONDS = 0.5
# The least that is taken to be left over: just so much dearer can work get for those behind it.
_LEAST_IDLE = 0.5


class Utilisation:
    """The share of the time, 0 to 1, in which prompts wait or are computed, forgetting what is long ago."""

    def __init__(self, now: float) -> None:
        self.share = 0.0
        self._since = now

    def observe(self, busy: bool, now: float) -> None:
        """Since the last call there were prompts to compute, or there were none."""
        kept = math.exp(-min(now - self._since, _LONGEST_PAUSE_SECONDS) / _MEMORY_SECONDS)
        self.share = kept * self.share + (1 - kept) * busy
        self._since = now

    def delay(self, seconds: float) -> float:
        """Seconds by which so much further work puts off what is behind it in the queue: w / (1 - ρ), as in M/G/1."""
        return seconds / max(_LEAST_IDLE, 1 - self.share)
