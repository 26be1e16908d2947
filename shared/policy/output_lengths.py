"""How long outputs become, and so how much of one is still to come."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque

# Outputs that are remembered, the latest; and before there were any, this many are taken to have been so long.
_NUM_REMEMBERED = 64
_NUM_PRIOR = 2
_PRIOR_TOKENS = 128
# What is longer than was expected goes on for as long as it has already (Lindy's law), and for so much at least.
_LEAST_REMAINING = 16.0


class OutputLengths:
    """Of the sequences that have ended: the mean residual life of those that go on."""

    def __init__(self) -> None:
        self._latest: deque[int] = deque()
        self._sorted: list[int] = []

    def observe(self, num_tokens: int) -> None:
        """A sequence has ended with that much output."""
        self._latest.append(num_tokens)
        insort(self._sorted, num_tokens)
        if len(self._latest) > _NUM_REMEMBERED:
            self._sorted.remove(self._latest.popleft())

    def remaining(self, num_tokens: int) -> float:
        """Tokens that may be expected to follow the first `num_tokens` of an output: the mean over those that became
        longer, and over the prior."""
        longer = self._sorted[bisect_right(self._sorted, num_tokens) :]
        prior = max(_PRIOR_TOKENS - num_tokens, num_tokens)
        followed = sum(longer) - len(longer) * num_tokens + _NUM_PRIOR * prior
        return max(_LEAST_REMAINING, followed / (len(longer) + _NUM_PRIOR))
