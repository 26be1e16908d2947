"""A choice for all sequences of a worker, and for how long it stands."""

from __future__ import annotations

import math

from shared.policy.step_costs import StepCosts

# It stands for so many rounds or plain steps, and at least so long and so long for each sequence, up to half a second,
# as choosing takes time too, for each; unless the load has changed by more than this share.
_REST_ROUNDS = 8
_LEAST_REST_SECONDS = 0.1
_REST_SECONDS_EACH = 0.01
_MOST_REST_SECONDS_FOR_ALL = 0.5
_NEW_LOAD = 0.25
# For so many times as many it is none where prompts keep it from being changed.
_MANY_MORE = 2


class Decision:
    """When it was made, for how many, and how long that lasts. Times are seconds."""

    def __init__(self, target: StepCosts) -> None:
        self._target = target
        self._made_at = -math.inf
        self._load = 0
        # With those that waited.
        self._num_sequences = 0
        self.rest = 0.0

    @property
    def is_made(self) -> bool:
        """Whether there is one that nothing has made void."""
        return self._made_at > -math.inf

    def stands(self, load: int, now: float) -> bool:
        """Whether it was made not long ago, for much the same load."""
        new_load = abs(load - self._load) > _NEW_LOAD * self._load
        return now - self._made_at <= (0.5 * self._target.seconds(1) if new_load else self.rest)

    def holds_for(self, num_sequences: int) -> bool:
        """Whether so many, with those that wait, are not many more than it was made for."""
        return num_sequences <= _MANY_MORE * self._num_sequences

    def make(self, load: int, num_waiting: int, now: float) -> None:
        self._made_at, self._load, self._num_sequences = now, load, load + num_waiting

    def let_rest(self, seconds: float, num_sequences: int, young: bool) -> None:
        """`seconds`: of a round, or plain step, of what was chosen; `young`: whether that is still to show its
        worth, and is looked at more often."""
        self.rest = _REST_ROUNDS * seconds
        if not young:
            for_all = min(_REST_SECONDS_EACH * num_sequences, _MOST_REST_SECONDS_FOR_ALL)
            self.rest = max(self.rest, _LEAST_REST_SECONDS, for_all)

    def make_void(self) -> None:
        """What it was made by is known better now."""
        self._made_at = -math.inf
