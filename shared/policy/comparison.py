"""Two ways compared: what each brought in steps that were made in turns."""

from __future__ import annotations


class Side:
    """What one of both brought. Steps of which only the tokens are known count as long as the others took on
    average."""

    def __init__(self) -> None:
        self.num_steps = self.num_measured = 0
        self.num_tokens = 0.0
        self._waited = self._seconds = 0.0
        # Of the longest of all.
        self._longest, self._tokens_of_longest = 0.0, 0.0

    def observe(self, num_tokens: float, seconds: float | None, waited: float) -> None:
        """A step brought so many tokens, took that long, or nobody knows, and waited so long before."""
        if seconds is None and not self.num_measured:
            return
        self.num_steps += 1
        self.num_tokens += num_tokens
        self._waited += waited
        if seconds is None:
            return
        self.num_measured += 1
        self._seconds += seconds
        if seconds > self._longest:
            self._longest, self._tokens_of_longest = seconds, num_tokens

    @property
    def rate(self) -> float:
        """Tokens a second; 0 as long as no step was measured."""
        return self._rate(self.num_tokens, self.num_steps, self._seconds, self.num_measured)

    @property
    def tokens_each(self) -> float:
        """Of a step; once there was one."""
        return self.num_tokens / self.num_steps

    @property
    def seconds_apart(self) -> float:
        """Of a step and of what it waited; once some were measured."""
        return self._seconds / self.num_measured + self._waited / self.num_steps

    @property
    def rate_but_longest(self) -> float:
        """And without the longest step; 0 as long as no other was measured."""
        tokens, seconds = self.num_tokens - self._tokens_of_longest, self._seconds - self._longest
        return self._rate(tokens, self.num_steps - 1, seconds, self.num_measured - 1)

    def _rate(self, num_tokens: float, num_steps: int, seconds: float, num_measured: int) -> float:
        if num_measured <= 0 or seconds <= 0:
            return 0.0
        return num_tokens / num_steps / (seconds / num_measured + self._waited / self.num_steps)


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

    def is_certain(self, share: float) -> bool:
        """Whether one of both brings no more than this share of what the other does, and did whichever of them had not
        made its longest step: a machine that stands still for a moment is no reason, nor is what a way takes now and
        then alone."""
        tried, gone = self.tried, self.gone
        pairs = (tried.rate, gone.rate), (tried.rate_but_longest, gone.rate), (tried.rate, gone.rate_but_longest)
        return all(ours <= share * theirs for ours, theirs in pairs) or all(
            theirs <= share * ours for ours, theirs in pairs
        )
