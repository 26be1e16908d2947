"""What all sequences of a worker came by, and in what time."""

from __future__ import annotations

from shared.policy.drafting import Situation


class Account:
    """Tokens, and the seconds in which they came, since they were asked for last. Of steps without prompts alone: what
    prompts add to a step is only reckoned, and errs by more than rounds gain."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._num_tokens = 0
        # The latest step of which one has told, and whether what it says counts: it had no prompts, and somebody was
        # there before.
        self._received = 0.0
        self._prefill_seconds = 0.0
        self._counts = False

    def begin(self, now: Situation) -> None:
        """Nobody was there; one comes, and stands there."""
        self._received, self._prefill_seconds, self._counts = now.received, now.prefill_seconds, False

    def note(self, before: Situation, now: Situation, most_seconds: float) -> None:
        """One of them stands there, and stood there `before`. More than `most_seconds` from step to step count as so
        much: it was held up."""
        if now.received > self._received:
            self._counts = now.prefill_seconds == self._prefill_seconds
            if self._counts:
                self._seconds += min(now.received - self._received, most_seconds)
            self._received, self._prefill_seconds = now.received, now.prefill_seconds
        if self._counts:
            self._num_tokens += now.num_output - before.num_output

    def close(self) -> tuple[float, int]:
        """The seconds and tokens since this was called last."""
        closed = self._seconds, self._num_tokens
        self._seconds, self._num_tokens = 0.0, 0
        return closed
