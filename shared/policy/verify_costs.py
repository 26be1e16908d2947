"""What a target's own steps take, by the draft tokens that they verify: measured, not only by their sizes."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import median
from typing import Final

from shared.policy.overhead import nearest_power
from shared.policy.step_costs import StepCosts

# A new measurement of plain steps counts so much against those before it, or more while there are few; and is believed
# to be off by no more than this, a logarithm.
_WEIGHT: Final = 0.1
_NUM_PRIOR: Final = 2.0
_MOST_ERROR: Final = 0.3
# What verifying takes beyond its rows is the median of so many steps, so that one that stood still says nothing.
_NUM_REMEMBERED: Final = 3
# And forgotten by so much with each step that is told of and verified nothing: where that is all that speaks against
# it, it is tried again after some hundreds of them.
_FORGOTTEN: Final = 0.002


@dataclass(slots=True)
class _Learnt:
    """`ratio`: of a plain step to what its size says, as a logarithm; `extras`: seconds of the latest steps that
    verified, beyond their rows, and `extra` what is made of them."""

    ratio: float = 0.0
    num_plain: int = 0
    extra: float = 0.0
    extras: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_REMEMBERED))


class VerifyCosts:
    """Seconds of a step of `load` sequences that verifies so many of their draft tokens.

    By the step costs of warm-up, as far as rows go; what all steps take longer than these say, and what sampling takes
    beside draft tokens, are learnt from the steps, by the load's power of two.
    """

    def __init__(self, costs: StepCosts) -> None:
        self._costs = costs
        self._learnt: dict[int, _Learnt] = {}

    def seconds(self, load: int, num_draft_tokens: int) -> float:
        at = self._at(load)
        seconds = math.exp(at.ratio) * self._costs.seconds(load + num_draft_tokens)
        return seconds + at.extra if num_draft_tokens else seconds

    def row_seconds(self, load: int) -> float:
        """What a row more of each sequence takes, each."""
        longer = self._costs.seconds(2 * load) - self._costs.seconds(load)
        return math.exp(self._at(load).ratio) * longer / load

    def observe(self, load: int, num_draft_tokens: int, seconds: float) -> None:
        """Such a step took that long, without prompts."""
        if seconds <= 0:
            return
        at = self._at(load)
        if num_draft_tokens == 0:
            at.num_plain += 1
            error = min(max(math.log(seconds / self.seconds(load, 0)), -_MOST_ERROR), _MOST_ERROR)
            at.ratio += max(_WEIGHT, 1 / (at.num_plain + _NUM_PRIOR)) * error
            at.extra *= 1 - _FORGOTTEN
            return
        at.extras.append(seconds - math.exp(at.ratio) * self._costs.seconds(load + num_draft_tokens))
        at.extra = max(0.0, median(at.extras))

    def _at(self, load: int) -> _Learnt:
        bucket = nearest_power(load)
        found = self._learnt.get(bucket)
        if found is None:
            found = self._learnt[bucket] = _Learnt()
        return found
