"""What steps of one kind bring, and how long they take, by the latest of them."""

from __future__ import annotations

from typing import Final

# Of what steps brought in which time so much is remembered, in steps.
_MEMORY_STEPS: Final = 50.0
_KEPT: Final = 1 - 1 / _MEMORY_STEPS
# And of what they brought, whatever the time: that is a matter of luck. Were more of them remembered, texts that change
# would be compared with others.
_REMEMBERED_STEPS: Final = 60


class Goodput:
    """Tokens a second, by the latest steps and what they waited."""

    def __init__(self) -> None:
        self.num_seen = 0
        self.num_steps = 0.0
        self._tokens = 0.0
        self._seconds = 0.0
        self._waited = 0.0

    @property
    def rate(self) -> float:
        return self._tokens / (self._seconds + self._waited) if self._seconds > 0 else 0.0

    @property
    def step_seconds(self) -> float:
        return self._seconds / self.num_steps if self.num_steps else 0.0

    @property
    def seconds_apart(self) -> float:
        """Of a step and of what it waited."""
        return (self._seconds + self._waited) / self.num_steps if self.num_steps else 0.0

    def observe(self, num_tokens: float, seconds: float, waited: float, num_steps: int = 1) -> None:
        """Of so many steps together, all alike."""
        kept = _KEPT**num_steps
        share = (1 - kept) / (1 - _KEPT) / num_steps  # of them that is not forgotten at once
        self.num_seen += num_steps
        self.num_steps = self.num_steps * kept + share * num_steps
        self._tokens = self._tokens * kept + share * num_tokens
        self._seconds = self._seconds * kept + share * seconds
        self._waited = self._waited * kept + share * waited


class Yield:
    """Tokens a step, of many."""

    def __init__(self) -> None:
        self.mean = 0.0
        self._num_steps = 0

    def observe(self, num_tokens: float, num_steps: int = 1) -> None:
        """Of so many steps together."""
        self._num_steps = min(self._num_steps + num_steps, max(_REMEMBERED_STEPS, num_steps))
        self.mean += (num_tokens / num_steps - self.mean) * num_steps / self._num_steps
