"""What a worker's steps cost, as a function of the tokens in them."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence

# How much a new measurement counts against those before it, and how far off it may be (in logarithms): a
# step that took ten times as long says little about the next one.
_WEIGHT = 0.1
_MOST_ERROR = 0.4


class StepCosts:
    """Seconds of a worker's step as a function of the tokens in it.

    Starts from the worker's own warm-up measurements; `observe` refines them. Between measured sizes
    it is linear. More tokens do not take less time: where the measurements say so, that is noise.
    """

    def __init__(self, measured: Sequence[tuple[int, float]]) -> None:
        """`measured`: (tokens, seconds), by increasing size, at least one."""
        self._sizes = [size for size, _ in measured]
        self._seconds = _without_falls([seconds for _, seconds in measured])

    @property
    def measured(self) -> list[tuple[int, float]]:
        """(tokens, seconds), by increasing size: as it is by now."""
        return list(zip(self._sizes, self._seconds, strict=True))

    def seconds(self, num_tokens: float) -> float:
        sizes, seconds = self._sizes, self._seconds
        above = bisect.bisect_left(sizes, num_tokens)
        if above == 0:
            return seconds[0]
        if above == len(sizes):
            # Beyond the largest size steps are bound by arithmetic.
            return seconds[-1] * num_tokens / sizes[-1]
        share = (num_tokens - sizes[above - 1]) / (sizes[above] - sizes[above - 1])
        return (1 - share) * seconds[above - 1] + share * seconds[above]

    def seconds_of_prompts(self, num_tokens: int, num_prompt_tokens: int, num_decoding: int, seconds: float) -> float:
        """Of the `seconds` of a step of `num_tokens`, what its prompt tokens add to a plain step of all
        `num_decoding` sequences.

        That is what they cost plain decoding, where they ride along. What a step for them alone takes beyond it, while
        rounds have their tokens drafted, is the rounds' own cost.
        """
        if num_prompt_tokens == 0:
            return 0.0
        beside = max(num_tokens - num_prompt_tokens, num_decoding)
        added = self.seconds(beside + num_prompt_tokens) - (self.seconds(beside) if beside else 0.0)
        return seconds * min(max(added / self.seconds(num_tokens), 0.0), 1.0)

    def observe(self, num_tokens: int, seconds: float) -> None:
        """A step of that many tokens took that long.

        Half of what it teaches is about the sizes around it, half about all: a machine that others use too,
        or contexts that grow, slow every step.
        """
        if num_tokens < 1 or seconds <= 0:
            return
        error = math.log(seconds / self.seconds(num_tokens))
        step = _WEIGHT * min(max(error, -_MOST_ERROR), _MOST_ERROR)
        above = bisect.bisect_left(self._sizes, num_tokens)
        around = {min(above, len(self._sizes) - 1), max(above - 1, 0)}
        if above < len(self._sizes) and self._sizes[above] == num_tokens:
            around = {above}
        common = math.exp(step / 2) if num_tokens <= self._sizes[-1] else 1.0
        for i in range(len(self._seconds)):
            self._seconds[i] *= common * (math.exp(step / 2) if i in around else 1.0)


def _without_falls(values: list[float]) -> list[float]:
    """The values that never fall and are closest to these, by least squares: isotonic regression, by pooling
    adjacent violators (Ayer et al. 1955)."""
    pools: list[tuple[float, int]] = []  # mean, size
    for value in values:
        pools.append((value, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (mean, size), (before, size_before) = pools.pop(), pools.pop()
            pools.append(((mean * size + before * size_before) / (size + size_before), size + size_before))
    return [mean for mean, size in pools for _ in range(size)]
