"""How far a drafter's guesses come true."""

from __future__ import annotations

from shared.policy.calibration import Calibration


class Foresight:
    """A drafter's guesses of one sequence, as calibrated by what became of them: of its first choices for a place apart
    from its others, as a first choice is accepted far more often than a second one that it takes to be as likely.

    `prior` is whose experience a new sequence starts from; it learns from every observation too.
    """

    def __init__(self, prior: Foresight | None = None) -> None:
        self._first: Calibration = Calibration(None if prior is None else prior._first)
        self._other: Calibration = Calibration(None if prior is None else prior._other)

    def likelihood(self, guess: float, is_first: bool) -> float:
        """Of a token whose turn comes, that the drafter takes to be so likely, in [0, 1]."""
        return (self._first if is_first else self._other).likelihood(guess)

    def observe(self, guess: float, is_first: bool, accepted: bool) -> None:
        """A token's turn came."""
        (self._first if is_first else self._other).observe(guess, accepted)
