"""What token trees bring beside chains, and how large they should be."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from shared.policy.acceptance import expected_tokens
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
# What shapes brought is remembered for so many rounds. Before, what all should bring is taken to have been right for so
# many tokens, and one to bring as much of it as all.
_MEMORY_ROUNDS: Final = 128.0
_PRIOR_TOKENS: Final = 50.0


def shallower(depth: int) -> int:
    """The greatest depth of trees below that; 0 if there is none."""
    return max((each for each in _DEPTHS if each < depth), default=0)


class _Brought:
    """Tokens that rounds should have brought, and what they did."""

    def __init__(self) -> None:
        self._num_rounds = self._expected = self._found = 0.0

    def share(self, prior: float) -> float:
        """`prior`: what is believed before there are any."""
        return (self._found + _PRIOR_TOKENS * prior) / (self._expected + _PRIOR_TOKENS)

    def add(self, expected: float, found: float) -> None:
        kept = min(1.0, _MEMORY_ROUNDS / (self._num_rounds + 1))
        self._num_rounds = (self._num_rounds + 1) * kept
        self._expected = (self._expected + expected) * kept
        self._found = (self._found + found) * kept


class Trees:
    """Trees of one target worker's sequences.

    One of b tokens for each of its depth γ holds what the target draws at a depth, where a chain would with the chance
    α, with the chance

        1 - b^(-k) (1 - α)

    as the b likeliest tokens together are missed the less the more they are. A round of it brings what a chain of γ
    would with this in place of α, times what rounds of that shape, or as long as there were few those of all, brought
    of that: some are deeper where it is easy, or copied and deeper than asked for, and where easy places come together
    all bring more. The exponent k and these shares are learnt from all that are grown, and differ little from text to
    text.
    """

    def __init__(self, most_nodes: int) -> None:
        """`most_nodes`: 0 for no trees."""
        self._most_nodes = most_nodes
        # How many tokens chains should have missed, the log b of the trees in their place in sum, and how many these
        # did.
        self._chains = _PRIOR_WEIGHT
        self._log_branching = _PRIOR_WEIGHT * math.log(_PRIOR_BRANCHING)
        self._missed = _PRIOR_WEIGHT * _PRIOR_MISSES
        self._brought: dict[Shape, _Brought] = {}
        self._all_brought = _Brought()

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

    def tokens(self, acceptance_rate: float, shape: Shape) -> float:
        """What a round with such trees brings a sequence whose chains hold the next token with that chance."""
        expected = self._expected(acceptance_rate, shape)
        # One that is deeper than asked for says so itself.
        of_all = min(self._all_brought.share(1.0), (shape.num_draft_tokens + 1) / expected)
        brought = self._brought.get(shape)
        return min(expected * (of_all if brought is None else brought.share(of_all)), shape.num_nodes + 1.0)

    def observe(self, acceptance_rate: float, shape: Shape, num_accepted: int, ended: bool = False) -> None:
        """Of a proposal where such a tree was asked for so many tokens were accepted, and with the last of them the
        sequence `ended`, or not."""
        depth = shape.num_draft_tokens
        num_looked_for = min(num_accepted + (not ended), depth)
        chains = num_looked_for * max(0.0, 1 - acceptance_rate)
        self._chains += chains
        self._log_branching += chains * math.log(shape.branching)
        self._missed += max(0, num_looked_for - num_accepted)
        kept = _MEMORY / max(_MEMORY, self._chains)
        self._chains *= kept
        self._log_branching *= kept
        self._missed *= kept
        if not ended:
            expected = self._expected(acceptance_rate, shape)
            for brought in (self._brought.setdefault(shape, _Brought()), self._all_brought):
                brought.add(expected, num_accepted + 1)

    def _expected(self, acceptance_rate: float, shape: Shape) -> float:
        """The same by all trees' misses alone."""
        missed = max(self._missed, _LEAST_MISSES)
        exponent = max(0.0, math.log(self._chains / missed) * self._chains / self._log_branching)
        rate = 1 - math.pow(shape.branching, -exponent) * (1 - acceptance_rate)
        return expected_tokens(max(0.0, rate), shape.num_draft_tokens)
