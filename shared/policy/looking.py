"""How closely to look for something to copy: by what that brought."""

from __future__ import annotations

from typing import Final

# A look counts so much against those before it, of a sequence and of all, and so much at most: in plain steps of the
# sequence. Most looks find nothing and cost a twentieth of a step, few spare one or two: who gives up behind thirty in
# a row often does so by chance.
_WEIGHT: Final = 0.01
_WEIGHT_OF_ALL: Final = 0.005
_MOST: Final = 4.0
# What it is taken to bring before anything was seen; and at least by each new sequence, whose text may be another.
_CREDIT: Final = 0.2
_LEAST_CREDIT: Final = 0.005
# Where looking closely does not pay it is done in one step of so many.
_STEPS_APART: Final = 32


class Looking:
    """Whether short matches are looked for, too: they are found often, take most of the time that copying takes, and
    may be worth little. Long ones are rare, soon ruled out, and always looked for.

    `prior` is whose experience a new sequence starts from; it learns from every observation too.
    """

    def __init__(self, prior: Looking | None = None) -> None:
        self._prior = prior
        # What a close look spares on average, less what it takes.
        self._worth: float = _CREDIT if prior is None else max(prior._worth, _LEAST_CREDIT)
        self._num_skipped = 0

    @property
    def pays(self) -> bool:
        """Whether close looks have paid of late."""
        return self._worth > 0

    def closely(self, num_steps: int = 1) -> bool:
        """Whether the next step is to look for all; `num_steps`: with those before it that did not look at all."""
        self._num_skipped += num_steps
        if self.pays or self._num_skipped >= _STEPS_APART:
            self._num_skipped = 0
            return True
        return False

    def observe(self, spared: float, spent: float) -> None:
        """A close look spared so many plain steps of its sequence, and took, with verifying what it found, as much time
        as so many of them."""
        weight = _WEIGHT_OF_ALL if self._prior is None else _WEIGHT
        self._worth += weight * (min(spared, _MOST) - min(spent, _MOST) - self._worth)
        if self._prior is not None:
            self._prior.observe(spared, spent)
