"""What simulated workers have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Generic, NamedTuple, TypeVar

from shared.policy.step_costs import StepCosts

T = TypeVar("T")


class ByKind(NamedTuple, Generic[T]):
    """Of steps with tokens of prompts in them, and of those without."""

    prompts: T
    streams: T


AS_ALONE: Final = ByKind(1.0, 1.0)
AS_FORESEEN: Final[ByKind[tuple[float, ...]]] = ByKind((1.0,), (1.0,))


@dataclass(frozen=True)
class Machine:
    """What all workers have in common: `costs`, most tokens and sequences in a step, blocks of KV and their size.

    What a step takes more, `costs` being without: `attention_seconds` for each token that one of a prompt attends to,
    `context_seconds` for each that a stream that decodes does.
    `beside_another`: how many times that is what a step takes that begins while another worker is in one, if all
    workers are on one machine and so share its memory and cores.
    `variation`: how many times that steps really take, one step after another, from anywhere on and around again; a
    run of steps has one of these, and the next run the one so many steps later.
    `latency_seconds`: from the client to the worker and back, with the router's work on a request in between.
    `longest_run`: steps simulated at once, at most; in a run contexts do not grow for attention.
    """

    costs: StepCosts
    max_batch_tokens: int = 512
    max_sequences: int = 256
    num_blocks: int = 16_384
    block_size: int = 16
    attention_seconds: float = 0.0
    context_seconds: float = 0.0
    beside_another: ByKind[float] = AS_ALONE
    variation: ByKind[tuple[float, ...]] = AS_FORESEEN
    latency_seconds: float = 0.0
    longest_run: int = 1 << 40

    def __post_init__(self) -> None:
        """Raises ValueError for a step that could not hold a token of every sequence."""
        if self.max_sequences > self.max_batch_tokens:
            raise ValueError(f"{self.max_sequences} sequences do not fit a step of {self.max_batch_tokens} tokens")

    @property
    def kv_tokens(self) -> int:
        return self.num_blocks * self.block_size
