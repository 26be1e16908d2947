"""What the sequences of a worker came by, and in what time."""

from __future__ import annotations

from typing import NamedTuple

from shared.policy.drafting import Situation

# What took longer than so many plain steps, more than rounds do, says nothing of them: something held it up. And who
# tells of the tokens of more than are granted at a time was not asked meanwhile.
_LONGEST_STEPS = 16
_LONGEST_ABSENCE_STEPS = 40


class Closed(NamedTuple):
    """In so many seconds all sequences together came by `num_tokens`, each by `tokens_each`."""

    seconds: float
    tokens_each: float
    num_tokens: int


class Account:
    """Tokens, and the seconds in which they came, since they were asked for last. Of steps without prompts alone: what
    prompts add to a step is only reckoned, and errs by more than rounds gain. Which step the tokens of several came in
    is not told apart: the latest decides."""

    def __init__(self) -> None:
        self._closed = Closed(0.0, 0.0, 0)
        # The latest step of which one has told, and whether what it says counts.
        self._received = 0.0
        self._prefill_seconds = 0.0
        self._counts = False

    def begin(self, now: Situation) -> None:
        """Nobody was there; one comes, and stands there."""
        self._received, self._prefill_seconds, self._counts = now.received, now.prefill_seconds, False

    def note(self, before: Situation | None, now: Situation, num_sequences: int, plain_seconds: float) -> None:
        """One of so many sequences stands there, and stood there `before`, if it was here. A plain step takes
        `plain_seconds`."""
        if now.received > self._received:
            seconds = now.received - self._received
            without_prompts = now.prefill_seconds == self._prefill_seconds
            self._counts = without_prompts and seconds <= _LONGEST_STEPS * plain_seconds
            if self._counts:
                self._closed = self._closed._replace(seconds=self._closed.seconds + seconds)
            self._received, self._prefill_seconds = now.received, now.prefill_seconds
        if before is not None and now.received - before.received <= _LONGEST_ABSENCE_STEPS * plain_seconds:
            self.note_tokens(now.num_output - before.num_output, num_sequences)

    def note_tokens(self, num_tokens: int, num_sequences: int) -> None:
        """One of so many sequences has come by so many tokens in the latest step."""
        if self._counts:
            seconds, tokens_each, before = self._closed
            self._closed = Closed(seconds, tokens_each + num_tokens / num_sequences, before + num_tokens)

    def close(self) -> Closed:
        """All since this was called last."""
        closed, self._closed = self._closed, Closed(0.0, 0.0, 0)
        return closed
