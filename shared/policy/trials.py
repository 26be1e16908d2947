"""How long it is held against rounds that they took too long."""

from __future__ import annotations

# What rounds were found to take counts half after so many seconds without any: they may have met a bad moment.
_FIRST_HALF_LIFE = 4.0
# Each time that it is found again soon, within so many half-lives, twice as long. And so many times as long as was
# lost by finding out, so that this takes a small share of the time; what rounds brought meanwhile may have been less by
# this than it seemed.
_SOON = 4.0
_TIMES_LOST = 80.0
_UNKNOWN_LOSS = 0.08
_LONGEST_HALF_LIFE = 600.0
# So many rounds of everybody tell whether it was right to begin; and so long what they tell is acted on at once.
_MEASURED_ROUNDS = 6.0
_YOUNG_ROUNDS = 32.0


class Trials:
    """Rounds at one load: when there were any, and how often they had to end soon after they began.

    `num_failed`: how often in a row. All times are seconds of the caller's clock.
    """

    def __init__(self) -> None:
        self.num_failed = 0
        self._half_life = _FIRST_HALF_LIFE
        self._began: float | None = None
        self._lost = 0.0
        self._noted_at = 0.0
        self._last_round = 0.0
        # How many rounds of everybody it had, and what the first ones should have taken and took.
        self._num_rounds = 0.0
        self._measured: list[tuple[float, float]] = []

    @property
    def running(self) -> bool:
        return self._began is not None

    @property
    def young(self) -> bool:
        """Whether its first rounds are known, and few others."""
        return self.running and _MEASURED_ROUNDS <= self._num_rounds < _YOUNG_ROUNDS

    def go_on(self, now: float, gain: float) -> None:
        """Rounds are to be made from now on, or still, and seem to bring so many times what plain decoding would."""
        if self._began is None:
            self._began, self._lost = now, 0.0
            self._num_rounds, self._measured = 0.0, []
        else:
            self._lost += (now - self._noted_at) * max(0.0, 1 + _UNKNOWN_LOSS - gain)
        self._noted_at = now

    def observe_round(self, now: float, expected: float, seconds: float, weight: float) -> list[tuple[float, float]]:
        """There was one that should have taken `expected` seconds; `weight`: what share of everybody's it is.

        Returns what all the first ones should have taken and took, once when they are known, and else nothing.
        """
        self._last_round = now
        before = self._num_rounds
        self._num_rounds += weight
        if not self.running or before >= _MEASURED_ROUNDS:
            return []
        self._measured.append((expected, seconds))
        return self._measured if self._num_rounds >= _MEASURED_ROUNDS else []

    def end(self, now: float, gain: float) -> None:
        """No more rounds: they bring so many times what plain decoding would, and that is not enough. Safe to call
        again."""
        if self._began is None:
            return
        lasted = now - self._began
        self._began = None
        if lasted > _SOON * self._half_life:
            self.num_failed = 0
            self._half_life = _FIRST_HALF_LIFE
        else:
            self.num_failed += 1
            # If they turn out to lose only now that plain steps were measured, they did from the beginning.
            lost = max(self._lost, lasted * (1 - gain))
            self._half_life = min(max(2 * self._half_life, _TIMES_LOST * lost), _LONGEST_HALF_LIFE)

    def cancel(self) -> None:
        """They ended for another reason."""
        self._began = None

    def confidence(self, now: float) -> float:
        """How much what the rounds took still counts, 0 to 1."""
        return float(0.5 ** ((now - self._last_round) / self._half_life))
