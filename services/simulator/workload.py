"""What arrives at a simulated service, and when: requests made up from a few numbers."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

# Below, nobody could tell arrivals from regular ones, and gamma's parameters leave what floats hold.
_LEAST_BURSTINESS = 1e-6


class Request(NamedTuple):
    """A request that arrives at `time` seconds and ends after `num_output_tokens`, at least one of each.

    The first `prefix_tokens` of its prompt are those of the text that `prefix_id` names.
    """

    time: float
    num_prompt_tokens: int
    num_output_tokens: int
    prefix_id: str | None = None
    prefix_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens, at least one, of a log-normal distribution: its mean, and its standard deviation as a share of that."""

    mean: float
    variation: float = 0.0

    def sampler(self, rng: random.Random) -> Callable[[], int]:
        if self.variation == 0:
            return lambda: max(1, round(self.mean))
        variance = math.log(1 + self.variation**2)
        mu, sigma = math.log(self.mean) - variance / 2, math.sqrt(variance)
        return lambda: max(1, round(rng.lognormvariate(mu, sigma)))


@dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """System prompts of `num_tokens` each, in front of the share `share` of all prompts.

    The r-th of `count` is as popular as 1 / r^exponent (Zipf).
    """

    count: int
    num_tokens: int
    share: float = 1.0
    exponent: float = 1.0


@dataclass(frozen=True, slots=True)
class Workload:
    """`num_requests` at `rate` a second; `burstiness` is the coefficient of variation of the time between two.

    1: Poisson; 0: as regular as a clock; else gamma-distributed. `prompt`: a prompt's own tokens, after its prefix.
    """

    rate: float
    num_requests: int
    prompt: Lengths
    output: Lengths
    burstiness: float = 1.0
    prefixes: SharedPrefixes | None = None

    def requests(self, seed: int | str) -> Iterator[Request]:
        """By time; the same seed gives the same ones. What is drawn for one thing does not shift the others."""
        gaps, texts, popularity = (random.Random(f"{seed} {what}") for what in ("gaps", "texts", "popularity"))
        gap = self._gaps(gaps)
        prompt, output = self.prompt.sampler(texts), self.output.sampler(texts)
        prefix = self._prefixes(popularity)
        now = 0.0
        for _ in range(self.num_requests):
            now += gap()
            prefix_id, prefix_tokens = prefix()
            yield Request(now, prefix_tokens + prompt(), output(), prefix_id, prefix_tokens)

    def _gaps(self, rng: random.Random) -> Callable[[], float]:
        if self.burstiness < _LEAST_BURSTINESS:
            return lambda: 1 / self.rate
        shape = self.burstiness**-2
        scale = 1 / (self.rate * shape)
        return lambda: rng.gammavariate(shape, scale)

    def _prefixes(self, rng: random.Random) -> Callable[[], tuple[str | None, int]]:
        prefixes = self.prefixes
        if prefixes is None:
            return lambda: (None, 0)
        names = [f"prefix-{rank}" for rank in range(1, prefixes.count + 1)]
        weights = list(itertools.accumulate(rank**-prefixes.exponent for rank in range(1, prefixes.count + 1)))

        def draw() -> tuple[str | None, int]:
            if rng.random() >= prefixes.share:
                return None, 0
            return rng.choices(names, cum_weights=weights)[0], prefixes.num_tokens

        return draw
