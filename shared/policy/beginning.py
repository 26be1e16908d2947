"""From what gain on drafting begins."""

from __future__ import annotations

from collections import Counter

from shared.policy.overhead import nearest_power
from shared.policy.round_costs import RoundCosts
from shared.policy.trials import PAY_FROM

# Drafting begins where it promises to pay (see `PAY_FROM`). But it begins where it promises anything, if rounds were
# never tried at that load: what they take is a guess then. Where those that are there end too soon for that to be worth
# knowing, within so many rounds, only where it promises more by the third.
_BEGIN_UNTRIED_AT = 1.0
_ROUNDS_THAT_TELL = 16.0
_BEGIN_UNTRIED_SHORT = 1.3
# Or once it was not tried so many times for that: the same load may come again and again.
_REFUSALS = 32
# And begins at so much more for each time in a row that it was in vain, four at most: a promise is off by so much where
# others use the machine, too, and what is only just worth it is tried when it seems to be more.
_MORE_BY_FAILURE = 0.08


class Beginning:
    """By load: where rounds were never tried it takes little, and where they were in vain lately more."""

    def __init__(self, costs: RoundCosts) -> None:
        self._costs = costs
        # By power of two of the load: how often it was not tried, as those there were to end soon.
        self._refusals: Counter[int] = Counter()

    def gain(self, load: int, busy: float) -> float:
        """What drafting must promise, times plain decoding. `busy`: see `RoundCosts`."""
        trials = self._costs.trials(load)
        if self._costs.is_untried(load) and trials.num_failed == 0:
            return _BEGIN_UNTRIED_AT
        return PAY_FROM + _MORE_BY_FAILURE * min(trials.num_failed, 4) * trials.confidence(busy)

    def refuses(self, load: int, asked: float, promised: float, num_rounds: float) -> bool:
        """Whether it is not tried after all, though it promises more than was asked: those that are there end within
        `num_rounds`. Counted: it is not refused for ever."""
        if asked != _BEGIN_UNTRIED_AT or num_rounds >= _ROUNDS_THAT_TELL or promised >= _BEGIN_UNTRIED_SHORT:
            return False
        self._refusals[nearest_power(load)] += 1
        return self._refusals[nearest_power(load)] < _REFUSALS
