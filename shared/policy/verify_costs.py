"""What a target's own steps take, by the draft tokens that they verify: measured, not only by their sizes."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from shared.policy.overhead import nearest_power
from shared.policy.step_costs import StepCosts

# A new measurement counts so much against those before it, or more while there are few; and is believed to be off by no
# more than this, a logarithm.
_WEIGHT: Final = 0.1
_NUM_PRIOR: Final = 2.0
_MOST_ERROR: Final = 0.3
# What verifying takes beyond its rows is forgotten by so much with each step that is told of and verified nothing:
# where that is all that speaks against it, it is tried again after some hundreds of them.
_FORGOTTEN: Final = 0.002
# And what is said of so many rows alone, with each that verifies others: a step or two then tell.
_ROWS_FORGOTTEN: Final = 0.01


@dataclass(slots=True)
class _Learnt:
    """`ratio`: of a plain step to what its size says, as a logarithm; `by_rows`: beside it of those that verify, by
    about how many rows they have: where arithmetic bounds them, they do not become faster when memory does. `extra`:
    seconds of verifying beyond its rows."""

    ratio: float = 0.0
    num_plain: int = 0
    num_verified: int = 0
    extra: float = 0.0
    by_rows: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))

    def forget(self, sizes: Iterable[int], share: float) -> None:
        for size in sizes:
            self.by_rows[size] *= 1 - share


class VerifyCosts:
    """Seconds of a step of `load` sequences that verifies so many of their draft tokens.

    By the step costs of warm-up, as far as rows go; what all steps take longer than these say, and what sampling takes
    beside draft tokens, are learnt from the steps, by the load's power of two, and what is true of their rows alone.
    """

    def __init__(self, costs: StepCosts) -> None:
        self._costs = costs
        self._learnt: dict[int, _Learnt] = {}

    def seconds(self, load: int, num_draft_tokens: int) -> float:
        at = self._at(load)
        seconds = math.exp(at.ratio) * self._costs.seconds(load + num_draft_tokens)
        if num_draft_tokens == 0:
            return seconds
        return seconds * math.exp(at.by_rows[_size_of(load + num_draft_tokens)]) + at.extra

    def row_seconds(self, load: int) -> float:
        """What a row more of each sequence takes, each."""
        longer = self._costs.seconds(2 * load) - self._costs.seconds(load)
        return math.exp(self._at(load).ratio) * longer / load

    def observe(self, load: int, num_draft_tokens: int, seconds: float) -> None:
        """Such a step took that long, without prompts."""
        if seconds <= 0:
            return
        at = self._at(load)
        expected = self.seconds(load, num_draft_tokens)
        error = min(max(math.log(seconds / expected), -_MOST_ERROR), _MOST_ERROR)
        if num_draft_tokens == 0:
            at.num_plain += 1
            at.ratio += max(_WEIGHT, 1 / (at.num_plain + _NUM_PRIOR)) * error
            at.extra *= 1 - _FORGOTTEN
            at.forget(at.by_rows.keys(), _FORGOTTEN)
            return
        at.num_verified += 1
        learnt = max(_WEIGHT, 1 / (at.num_verified + _NUM_PRIOR)) * error
        at.extra = max(0.0, at.extra + learnt * expected)
        size = _size_of(load + num_draft_tokens)
        at.by_rows[size] += learnt
        at.forget(at.by_rows.keys() - {size}, _ROWS_FORGOTTEN)

    def _at(self, load: int) -> _Learnt:
        bucket = nearest_power(load)
        found = self._learnt.get(bucket)
        if found is None:
            found = self._learnt[bucket] = _Learnt()
        return found


def _size_of(num_rows: int) -> int:
    """Where steps of about so many rows are alike: two sizes for each power of two."""
    return round(2 * math.log2(num_rows))
