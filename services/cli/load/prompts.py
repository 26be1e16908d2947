"""Prompts of a given length, some of which begin alike."""

from __future__ import annotations

import random

from services.simulator.workload import Request


class Prompts:
    """Token ids drawn at random: what a service computes does not depend on their sense.

    Those of one prefix begin with the same tokens, the longest of them with all.
    """

    def __init__(self, vocab_size: int, seed: int) -> None:
        self._vocab_size = vocab_size
        self._seed = seed
        self._rng = random.Random(f"{seed} prompts")
        self._prefixes: dict[str, list[int]] = {}

    def draw(self, request: Request) -> list[int]:
        """As many tokens as the request has, of which the first are its prefix's."""
        prefix: list[int] = []
        if request.prefix_id is not None:
            prefix = self._prefixes.get(request.prefix_id, [])
            if len(prefix) < request.prefix_tokens:
                rng = random.Random(f"{self._seed} prefix {request.prefix_id}")
                prefix = self._prefixes[request.prefix_id] = self._tokens(rng, request.prefix_tokens)
            prefix = prefix[: request.prefix_tokens]
        return prefix + self._tokens(self._rng, request.num_prompt_tokens - len(prefix))

    def _tokens(self, rng: random.Random, number: int) -> list[int]:
        return [rng.randrange(self._vocab_size) for _ in range(number)]
