"""What token trees bring beside chains, and how large they should be."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from shared.policy.shape import TREE_WIDTH, Shape
from shared.policy.step_costs import StepCosts

# Depths that are tried, and sizes in rows of verification, where kernels have their steps. A tree of fewer than so many
# tokens for each of its depth is hardly more than a chain, and nobody looks for more than so many at one place.
_DEPTHS: Final = (1, 2, 3, 4, 6)
_NUM_ROWS: Final = (6, 9, 12, 16, 24, 32, 48, 64)
_LEAST_BRANCHING: Final = 1.5
# Rows that are worth a try: those that should add no more than this share of a plain step, and leave room for prompts.
_MOST_ADDED: Final = 0.5
_MOST_ROWS: Final = 256
# Of the tokens that a chain misses a tree of so many tokens for each of its depth is taken to miss such a share, before
# it is known; that counts as so many misses of chains, and what came later is remembered for so many.
_PRIOR_MISSES: Final = 0.5
_PRIOR_BRANCHING: Final = 3.0
_PRIOR_WEIGHT: Final = 8.0
_LEAST_MISSES: Final = 0.01
_MEMORY: Final = 200.0


class _Misses:
    """How many tokens chains should have missed, and how many trees in their place did."""

    def __init__(self, chains: float = 0.0, trees: float = 0.0) -> None:
        self.chains = chains
        self.trees = trees

    def add(self, chains: float, trees: float) -> float:
        """Returns what is left of all when that was forgotten which is too much to remember."""
        self.chains += chains
        self.trees += trees
        kept = _MEMORY / max(_MEMORY, self.chains)
        self.chains *= kept
        self.trees *= kept
        return kept


_NONE: Final = _Misses()


class Trees:
    """Trees of one target worker's sequences.

    One of b tokens for each of its depth holds what the target draws at a depth, where a chain would with the chance
    α, with the chance

        1 - b^(-k) (1 - α)

    as the b likeliest tokens together are missed the less the more they are. The exponent k is learnt from all that are
    grown, and from those of each shape what their own is in place of b^(-k): it differs little from text to text.
    """

    def __init__(self, most_nodes: int) -> None:
        """`most_nodes`: 0 for no trees."""
        self._most_nodes = most_nodes
        # Of all, with what their log b is in sum, by what a chain should have missed; and of each shape.
        self._misses = _Misses(_PRIOR_WEIGHT, _PRIOR_WEIGHT * _PRIOR_MISSES)
        self._log_branching = _PRIOR_WEIGHT * math.log(_PRIOR_BRANCHING)
        self._own: dict[Shape, _Misses] = {}

    def shapes(self, target: StepCosts, load: int, most_depth: int) -> Sequence[Shape]:
        """Those worth considering where `load` sequences draft alike."""
        most_seconds = target.seconds(load) * (1 + _MOST_ADDED)
        sizes = [
            num_rows - 1
            for num_rows in _NUM_ROWS
            if num_rows <= min(self._most_nodes + 1, _MOST_ROWS // load)
            and target.seconds(load * num_rows) <= most_seconds
        ]
        return [
            Shape(depth, size)
            for depth in _DEPTHS
            for size in sizes
            if depth <= most_depth and _LEAST_BRANCHING * depth <= size <= TREE_WIDTH * depth
        ]

    def rate(self, acceptance_rate: float, shape: Shape) -> float:
        """How likely such a tree holds the next token of a sequence whose chains hold it with that chance."""
        return 1 - self._share(shape) * (1 - acceptance_rate)

    def observe(self, acceptance_rate: float, shape: Shape, num_looked_for: int, num_missed: int) -> None:
        """Of so many tokens that were looked for where such a tree was asked for, one behind the other, so many were
        missed."""
        misses = num_looked_for * (1 - acceptance_rate)
        self._own.setdefault(shape, _Misses()).add(misses, num_missed)
        self._log_branching += misses * math.log(shape.branching)
        self._log_branching *= self._misses.add(misses, num_missed)

    def _share(self, shape: Shape) -> float:
        """The share of a chain's misses that such a tree's are: by those of all b^(-k), and the more by its own the
        more there are."""
        missed = max(self._misses.trees, _LEAST_MISSES)
        exponent = math.log(self._misses.chains / missed) * self._misses.chains / self._log_branching
        of_all = math.pow(shape.branching, -max(0.0, exponent))
        own = self._own.get(shape, _NONE)
        return (own.trees + _PRIOR_WEIGHT * of_all) / (own.chains + _PRIOR_WEIGHT)
