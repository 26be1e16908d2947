"""How long it is held against rounds that they took too long."""

from __future__ import annotations

import math
from collections.abc import Hashable

# What rounds were found to take counts half after so many seconds without any: they may have met a bad moment.
_FIRST_HALF_LIFE = 4.0
# Each time that it is found again soon, within so many half-lives, twice as long. And so many times as long as was
# lost by finding out, so that this takes a small share of the time; what rounds brought meanwhile may have been less by
# this than it seemed.
_SOON = 4.0
_TIMES_LOST = 160.0
_UNKNOWN_LOSS = 0.08
_LONGEST_HALF_LIFE = 600.0
# So many rounds of everybody tell whether it was right to begin; and so long what they tell is acted on at once. So
# many that brought more than plain steps, in one go or with pauses, and those that were in vain are forgotten.
_MEASURED_ROUNDS = 6.0
_YOUNG_ROUNDS = 32.0
_PROVEN_ROUNDS = 64.0
# Rounds pay that bring so many times what plain steps do: estimates err, and changing between the two costs something
# itself. From their beginning on, however good the latest ones seem: catching up is in it, and all else that nobody
# reckoned with.
PAY_FROM = 1.08
# So many tokens tell that to some percents, of one trial or of several in a row: how many a round brings is chance.
_TELLING_TOKENS = 512
# What counts less than this is to be found out again.
_LITTLE = 0.5


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
        self._gain = 0.0
        self._last_round = -math.inf
        # How many rounds of everybody it had, and how many up to its latest decision; those that paid, since any that
        # did not.
        self._num_rounds = self._num_decided = self._num_proven = 0.0
        # How long it and those before it have gone on, how long plain steps would have taken for as much, and how many
        # tokens that is, as long as these are too few to tell, or it goes on.
        self._took = self._worth = 0.0
        self._num_tokens = 0
        # What its first rounds should have taken and took, of which load and shape, if that is to be found out.
        self._measures = False
        self._which: tuple[int, Hashable] | None = None
        self._measured: list[tuple[float, float]] = []

    @property
    def running(self) -> bool:
        return self._began is not None

    @property
    def measuring(self) -> bool:
        """Whether its first rounds are to tell, and are not known yet."""
        return self.running and self._measures and self._num_rounds < _MEASURED_ROUNDS

    @property
    def young(self) -> bool:
        """Whether its first rounds are known, and few others."""
        return self.running and _MEASURED_ROUNDS <= self._num_rounds < _YOUNG_ROUNDS

    def go_on(self, now: float, gain: float) -> None:
        """Rounds are to be made from now on, or still, and seem to bring so many times what plain decoding would."""
        if self._began is None:
            self._began, self._lost = now, 0.0
            self._measures = self.is_forgotten(now)
            self._num_rounds = self._num_decided = 0.0
            self._which = None
            if self._measures:
                self._close_account()
        else:
            self._lost += (now - self._noted_at) * max(0.0, 1 + _UNKNOWN_LOSS - gain)
            self._num_proven = self._num_proven + self._num_rounds - self._num_decided if self._pay(gain) else 0.0
            if self._num_proven >= _PROVEN_ROUNDS:
                self.num_failed, self._half_life = 0, _FIRST_HALF_LIFE
        self._num_decided, self._noted_at, self._gain = self._num_rounds, now, gain

    def account(self, seconds: float, worth: float, num_tokens: int) -> None:
        """So many tokens came in so many seconds, which plain steps would have brought in `worth`."""
        if self.running:
            self._took += seconds
            self._worth += worth
            self._num_tokens += num_tokens

    def is_forgotten(self, now: float) -> bool:
        """Whether what rounds took counts for little: so long ago were the last, if there were any."""
        return self.confidence(now) < _LITTLE

    def observe_round(
        self, now: float, which: tuple[int, Hashable] | None, expected: float, seconds: float, weight: float
    ) -> list[tuple[float, float]]:
        """There was one that should have taken `expected` seconds, of that load and shape; None where it says little of
        what those of all take. `weight`: what share of everybody's it is.

        Returns what all the first ones of one load and shape should have taken and took, once when they are known, if
        that is to be found out, and else nothing.
        """
        self._last_round = now
        if which is None:
            return []
        if which != self._which:
            self._which, self._measured = which, []
            if self._num_rounds < _MEASURED_ROUNDS:
                self._num_rounds = self._num_decided = 0.0
        measuring = self.measuring
        self._num_rounds += weight
        if not measuring:
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
        if lasted > _SOON * self._half_life and self._paid:
            self.num_failed = 0
            self._half_life = _FIRST_HALF_LIFE
        else:
            self.num_failed += 1
            self._num_proven = 0.0
            # If they turn out to lose only now that plain steps were measured, they did from the beginning.
            lost = max(self._lost, lasted * (1 - gain), self._took - self._worth)
            self._half_life = min(max(2 * self._half_life, _TIMES_LOST * lost), _LONGEST_HALF_LIFE)
        self._close_account()

    def cancel(self, now: float) -> None:
        """They end for another reason: in vain if they were known not to pay."""
        if self._began is not None and self._num_rounds >= _MEASURED_ROUNDS and not self._pay(self._gain):
            self.end(now, self._gain)
        self._began = None
        if self._num_tokens >= _TELLING_TOKENS:
            self._close_account()

    def _pay(self, gain: float) -> bool:
        """Whether they do, where the latest ones seem to bring so much."""
        return gain >= 1 and self._paid

    @property
    def _paid(self) -> bool:
        """Whether they did in all, as far as can be told."""
        return self._num_tokens < _TELLING_TOKENS or self._worth >= PAY_FROM * self._took

    def _close_account(self) -> None:
        self._took = self._worth = 0.0
        self._num_tokens = 0

    def confidence(self, now: float) -> float:
        """How much what the rounds took still counts, 0 to 1."""
        return float(0.5 ** ((now - self._last_round) / self._half_life))
