"""What a target's own steps take, by the draft tokens that they verify: measured, not only by their sizes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final

from shared.policy.overhead import nearest_power
from shared.policy.step_costs import StepCosts

# What is to be found out, to begin with, and how far off that may be: how many times as long steps take as their size
# says, and in plain steps what verifying takes beyond that, as such and for each draft token. By how much each changes
# from step to step: where a machine has become slower and where verifying has, only plain steps tell, which are rare.
_BEGINNING: Final = (1.0, 0.0, 0.0)
_DEVIATIONS: Final = (0.05, 0.5, 0.05)
_DRIFTS: Final = (0.002, 0.005, 0.0005)
_LEAST: Final = (0.05, 0.0, 0.0)
# A step strays by this share, and is believed to be off by no more than that, a logarithm.
_NOISE: Final = 0.05
_MOST_ERROR: Final = 0.3
# What verifying takes beyond its rows is forgotten by so much with each step that is told of: as such, if it verified
# nothing, and for each token with any. Where that is all that speaks against it, it is tried again after some hundreds.
_FORGOTTEN: Final = 0.002
# What is left of a step counts so much for others of about as many rows, where arithmetic bounds what memory does for
# fewer; and is forgotten by so much with each, also of other rows: what is true of all is found above, and of rows that
# are not verified any more a step or two then tell.
_ROWS_WEIGHT: Final = 0.1
_ROWS_FORGOTTEN: Final = 0.01
# How many draft tokens are usual, by the latest steps.
_USUAL_WEIGHT: Final = 0.1


class _Learnt:
    """Of about so many sequences: a Kalman filter of what is to be found out, each of which wanders on its own (Kalman
    1960). `by_rows`: what is true of steps of about so many rows alone, as a logarithm. `usual`: draft tokens of the
    latest steps that verified any; 0 as long as there were none."""

    def __init__(self) -> None:
        self.found = list(_BEGINNING)
        self.by_rows: dict[int, float] = {}
        self.usual = 0.0
        self._covariance = [[deviation**2 * (i == k) for k in range(3)] for i, deviation in enumerate(_DEVIATIONS)]

    def observe(self, size: float, num_draft_tokens: int, took: float, num_alike: int) -> None:
        """A step took so many plain ones, and should have taken `size` of them by its size; it stands for so many."""
        features = size, float(num_draft_tokens > 0), float(num_draft_tokens)
        expected = _dot(self.found, features)
        took = expected * math.exp(min(max(math.log(took / expected), -_MOST_ERROR), _MOST_ERROR))
        spread = [_dot(row, features) for row in self._covariance]
        variance = _dot(spread, features) + (_NOISE * took) ** 2
        for i, row in enumerate(self._covariance):
            self.found[i] = max(_LEAST[i], self.found[i] + spread[i] / variance * (took - expected))
            for k in range(3):
                row[k] -= spread[i] * spread[k] / variance
            row[i] += num_alike * _DRIFTS[i] ** 2
        self.found[2] *= (1 - _FORGOTTEN) ** num_alike
        if num_draft_tokens == 0:
            self.found[1] *= (1 - _FORGOTTEN) ** num_alike

    def forget_rows(self, share: float) -> None:
        for size in self.by_rows:
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
        if num_draft_tokens == 0:  # the most frequent question
            return self._at(load).found[0] * self._costs.seconds(load)
        return self.of(load)(num_draft_tokens)

    def of(self, load: int) -> Callable[[int], float]:
        """The same of so many sequences, for who asks of many draft tokens."""
        at, costs = self._at(load), self._costs
        longer, fixed, each = at.found
        fixed, each, by_rows = fixed * costs.seconds(load), each * costs.seconds(load), at.by_rows

        def seconds(num_draft_tokens: int) -> float:
            if num_draft_tokens == 0:
                return longer * costs.seconds(load)
            num_rows = load + num_draft_tokens
            size = math.exp(by_rows.get(_size_of(num_rows), 0.0)) * costs.seconds(num_rows)
            return longer * size + fixed + each * num_draft_tokens

        return seconds

    def row_seconds(self, load: int) -> float:
        """What a draft token more takes, among as many as there usually are; as long as there were none, one for each
        sequence."""
        most, seconds = max(2, round(self._at(load).usual) or load), self.of(load)
        least = most // 2
        return max(0.0, seconds(most) - seconds(least)) / (most - least)

    def observe(self, load: int, num_draft_tokens: int, seconds: float, num_alike: int = 1) -> None:
        """Such a step took that long, without prompts; `num_alike`: it stands for so many, of which it is the mean."""
        if seconds <= 0:
            return
        at, plain, rows = self._at(load), self._costs.seconds(load), _size_of(load + num_draft_tokens)
        size = self._costs.seconds(load + num_draft_tokens) / plain
        at.observe(size, num_draft_tokens, seconds / plain, num_alike)
        if num_draft_tokens == 0:
            at.forget_rows(1 - (1 - _FORGOTTEN) ** num_alike)
            return
        at.usual += _USUAL_WEIGHT * (num_draft_tokens - at.usual) if at.usual else num_draft_tokens
        error = math.log(seconds / self.seconds(load, num_draft_tokens))
        error = min(max(error, -_MOST_ERROR), _MOST_ERROR)
        at.by_rows[rows] = at.by_rows.get(rows, 0.0) + _ROWS_WEIGHT * error
        at.forget_rows(_ROWS_FORGOTTEN)

    def _at(self, load: int) -> _Learnt:
        bucket = nearest_power(load)
        found = self._learnt.get(bucket)
        if found is None:
            found = self._learnt[bucket] = _Learnt()
        return found


def _dot(left: Sequence[float], right: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(left, right, strict=True))


def _size_of(num_rows: int) -> int:
    """Where steps of about so many rows are alike: two sizes for each power of two."""
    return round(2 * math.log2(num_rows))
