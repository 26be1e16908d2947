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

    @property
    def running(self) -> bool:
        return self._began is not None

    def go_on(self, now: float, gain: float) -> None:
        """Rounds are to be made from now on, or still, and seem to bring so many times what plain decoding would."""
        if self._began is None:
            self._began, self._lost = now, 0.0
        else:
            self._lost += (now - self._noted_at) * max(0.0, 1 + _UNKNOWN_LOSS - gain)
        self._noted_at = now

    def observe_round(self, now: float) -> None:
        """There was one."""
        self._last_round = now

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
