"""Finds an engine's thread that hangs while the event loop beside it lives."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

# No step is thought to hang before that.
_MIN_LIMIT_SECONDS = 60.0
# Nor before it took so many times what one of the same size should: a long context's attention comes on top.
_LIMIT_FACTOR = 100.0
_TICK_SECONDS = 1.0


class StepWatchdog:
    """Watches the turns of an engine's loop: one that lasts longer than `limit_seconds` hangs.

    Time is counted in ticks of the event loop that calls, so that a process that was stopped, or not given the
    processor, is not taken for one that hangs.
    """

    def __init__(self, turn: Callable[[], int | None], limit_seconds: float) -> None:
        """`turn`: which turn the loop is in, None while it has nothing to do."""
        self.limit_seconds = limit_seconds
        self._turn = turn
        self._last_turn: int | None = None
        self._num_ticks = 0

    def tick(self) -> bool:
        """To be called once a second; whether the turn that the loop is in hangs."""
        turn = self._turn()
        self._num_ticks = self._num_ticks + 1 if turn is not None and turn == self._last_turn else 0
        self._last_turn = turn
        return self._num_ticks * _TICK_SECONDS >= self.limit_seconds

    async def wait(self) -> None:
        """Returns when the engine hangs."""
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            if self.tick():
                return


def step_limit(step_costs: Sequence[tuple[int, float]], max_batch_tokens: int) -> float:
    """Seconds that the largest step may take: 100 times what warm-up's (tokens, seconds) promise, at least 60."""
    if not step_costs:
        return _MIN_LIMIT_SECONDS
    num_tokens, seconds = step_costs[-1]
    return max(_MIN_LIMIT_SECONDS, _LIMIT_FACTOR * seconds * max(1.0, max_batch_tokens / num_tokens))
