"""Models that share workers, and what these have room for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from services.simulator.machine import Machine
from services.simulator.report import Objectives
from services.simulator.workload import Request
from shared.policy.step_costs import StepCosts

GIB = 1 << 30

# For each worker the models on it, by their numbers, in rising order.
Placement = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Model:
    """A model, its load by time, and its SLOs. KV is in bytes per token."""

    name: str
    costs: StepCosts
    weights_gib: float
    kv_bytes_per_token: float
    requests: Sequence[Request]
    objectives: Objectives

    @cached_property
    def longest(self) -> int:
        """Tokens of its longest request, prompt and output."""
        return max(request.num_prompt_tokens + request.num_output_tokens for request in self.requests)


class Link(NamedTuple):
    """What a transfer from worker to worker takes: `seconds`, and its bytes at `rate` a second."""

    seconds: float
    rate: float


@dataclass(frozen=True)
class Fleet:
    """Workers that are alike: how many, GiB of memory for weights and KV, most tokens and sequences in a step, tokens
    in a KV block.

    A worker holds its models' weights whole: models that are split over several workers are not simulated. What they
    leave is room for KV, the same number of bytes for each of them.
    """

    num_workers: int
    worker_gib: float
    max_batch_tokens: int
    max_sequences: int
    block_size: int
    link: Link

    def __post_init__(self) -> None:
        """Raises ValueError without workers."""
        if self.num_workers < 1:
            raise ValueError(f"several models need workers that do both: at least 1, not {self.num_workers}")

    def machine(self, model: Model, beside: Sequence[Model]) -> Machine | None:
        """What a worker is to the model, whose weights it holds with those of the others: steps and room for KV.

        None if the model's longest request has no room. Raises ValueError for steps that are too small.
        """
        left = self.worker_gib - model.weights_gib - sum(other.weights_gib for other in beside)
        num_tokens = left * GIB / (1 + len(beside)) / model.kv_bytes_per_token
        num_blocks = int(num_tokens // self.block_size)
        if num_blocks * self.block_size < model.longest:
            return None
        return Machine(model.costs, self.max_batch_tokens, self.max_sequences, num_blocks, self.block_size)

    def gib(self, model: Model) -> float:
        """GiB of a worker that the model needs at least: its weights, and KV of its longest request."""
        num_tokens = -(-model.longest // self.block_size) * self.block_size
        return model.weights_gib + num_tokens * model.kv_bytes_per_token / GIB

    def holds(self, models: Sequence[Model]) -> bool:
        """Whether a worker has room for them together: their weights, and KV of the longest request of each."""
        return all(
            self.machine(model, [*models[:place], *models[place + 1 :]]) is not None
            for place, model in enumerate(models)
        )
