"""How likely draft tokens are, from how likely such tokens turned out to be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

_NUM_BINS: Final = 10
# Where a sequence, or the first of all, has seen nothing yet, what it starts from counts as so many tokens.
_PRIOR_TOKENS: Final = 8.0
# And of each bin it remembers so many at most.
_MEMORY_TOKENS: Final = 100.0


class Calibration:
    """Turns what a source takes for a token's likelihood into the share of such tokens that were accepted.

    `prior` is whose experience a new sequence starts from; it learns from every observation too.
    """

    def __init__(self, prior: Calibration | None = None) -> None:
        self._prior = prior
        self._num_examined = [0.0] * _NUM_BINS
        self._num_accepted = [0.0] * _NUM_BINS

    def likelihood(self, guess: float) -> float:
        """Of a token whose turn comes, that the source takes to be so likely, in [0, 1]."""
        return self._of_bin(_bin(guess), guess)

    def observe(self, guess: float, accepted: bool) -> None:
        """A token's turn came."""
        i = _bin(guess)
        learning: Calibration | None = self
        while learning is not None:
            learning._num_accepted[i] += accepted
            learning._num_examined[i] += 1
            if learning._num_examined[i] > _MEMORY_TOKENS:
                scale = _MEMORY_TOKENS / learning._num_examined[i]
                learning._num_accepted[i] *= scale
                learning._num_examined[i] *= scale
            learning = learning._prior

    def _of_bin(self, i: int, guess: float) -> float:
        start = guess if self._prior is None else self._prior._of_bin(i, guess)
        return (self._num_accepted[i] + _PRIOR_TOKENS * start) / (self._num_examined[i] + _PRIOR_TOKENS)


def observe_proposal(
    token_ids: Sequence[int],
    parents: Sequence[int],
    committed: Sequence[int],
    observe: Callable[[int, bool], None],
) -> None:
    """Tells `observe`, by its place, what became of each draft token whose turn came, by what was committed behind the
    proposal's beginning. `parents`: see `Proposal`, in chains as well."""
    row = 0
    for token in committed:
        accepted = None
        for i, (parent, draft) in enumerate(zip(parents, token_ids, strict=True)):
            if parent == row:
                kept = draft == token and accepted is None
                observe(i, kept)
                accepted = i if kept else accepted
        if accepted is None:
            return
        row = accepted + 1


def _bin(guess: float) -> int:
    return min(int(guess * _NUM_BINS), _NUM_BINS - 1)
