"""How one sequence is sampled, and when it ends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

# Temperatures up to this one are greedy: they would leave the likeliest token alone, and float32 cannot divide
# by the least of them.
GREEDY_TEMPERATURE = 1e-6


class SelfDraft(NamedTuple):
    """What the target may draft itself for the steps that it takes without the router: with `num_draft_tokens` a chain
    of so many, or with more `num_nodes` than these a tree of those; without, what pays. `sources`: of target and
    suffix, if not either."""

    num_draft_tokens: int | None = None
    num_nodes: int = 0
    sources: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Resolved sampling parameters of one sequence; the router has validated and defaulted them.

    `seed` with `sequence_index` and a token's absolute position names that token's noise (coupled
    sampling); without a seed, rejection sampling is used. `stop_token_ids` holds all that end the
    sequence, the model's own included unless the request ignores them. `logprobs` is how many of the
    likeliest tokens to report; None reports nothing. `self_draft`: None where the target drafts nothing itself.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    sequence_index: int = 0
    min_tokens: int = 0
    max_tokens: int = 256
    stop_token_ids: frozenset[int] = frozenset()
    logprobs: int | None = None
    self_draft: SelfDraft | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature <= GREEDY_TEMPERATURE

    @property
    def coupled(self) -> bool:
        """Whether target and drafter draw with the same noise (greedy is that with none)."""
        return self.greedy or self.seed is not None

    @property
    def penalised(self) -> bool:
        """Whether logits depend on the tokens before."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0
