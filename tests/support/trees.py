"""Token trees for tests."""

from __future__ import annotations

import random
from collections.abc import Sequence

from shared.sampling.proposal import Proposal


def random_parents(rng: random.Random, size: int) -> tuple[int, ...]:
    """Any tree of that many tokens: chains, bushes and what lies between."""
    reach = rng.choice([1, 2, 4, size])
    return tuple(rng.randint(max(0, i - reach), i) for i in range(size))


def tree_around(rng: random.Random, guess: Sequence[int], size: int, vocab_size: int) -> Proposal:
    """A tree of that many tokens; of each token's children one may be that of `guess` at its depth."""
    parents = random_parents(rng, size)
    tokens: list[int] = []
    depths = [0]
    for parent in parents:
        depths.append(depths[parent] + 1)
        right = depths[-1] <= len(guess) and rng.random() < 0.6
        tokens.append(guess[depths[-1] - 1] if right else rng.randrange(vocab_size))
    return Proposal(tuple(tokens), parents=parents)
