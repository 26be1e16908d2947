"""Two ways compared: what each brought in steps that were made in turns."""

from __future__ import annotations


class Side:
    """What one of both brought.

    Steps of which only the tokens are known count as long as the others took on average, and the longest of all as
    long as the next: a machine that stands still for a moment decides nothing.
    """

    def __init__(self) -> None:
        self.num_steps = self.num_measured = 0
        self._tokens = 0
        self._waited = self._seconds = 0.0
        self._longest = self._next = 0.0

    def observe(self, num_tokens: int, seconds: float | None, waited: float) -> None:
        """A step brought so many tokens, took that long, or nobody knows, and waited so long before."""
        self.num_steps += 1
        self._tokens += num_tokens
        self._waited += waited
        if seconds is None:
            return
        self.num_measured += 1
        self._seconds += seconds
        if seconds > self._longest:
            self._longest, self._next = seconds, self._longest
        elif seconds > self._next:
            self._next = seconds

    @property
    def step_seconds(self) -> float:
        """What a step took on average; 0 as long as none was measured."""
        if self.num_measured < 2:
            return self._seconds
        return (self._seconds - self._longest + self._next) / self.num_measured

    @property
    def rate(self) -> float:
        """Tokens a second; 0 as long as no step was measured."""
        seconds = self.num_steps * self.step_seconds
        return self._tokens / (seconds + self._waited) if seconds > 0 else 0.0


class Comparison:
    """Of what is `tried` with what is `gone` meanwhile."""

    def __init__(self) -> None:
        self.tried, self.gone = Side(), Side()

    @property
    def num_steps(self) -> int:
        """That there were of both."""
        return min(self.tried.num_steps, self.gone.num_steps)

    @property
    def num_measured(self) -> int:
        """Of how many of both it is known how long they took."""
        return min(self.tried.num_measured, self.gone.num_measured)

    @property
    def smaller_share(self) -> float:
        """What the one that brings less brings of what the other does."""
        rates = self.tried.rate, self.gone.rate
        return min(rates) / max(rates) if max(rates) > 0 else 1.0
