"""What drafts inside a target worker, between its steps."""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as List
from typing import NamedTuple, Protocol

from torch import Tensor

from shared.engine.sequence import Sequence
from shared.engine.step_plan import StepPlan
from shared.sampling.proposal import Proposal
from shared.sampling.sampled import SampledTokens


class Growing(NamedTuple):
    """A sequence's tree as far as it is computed, and its newest tokens, which are to be: those of the rows from
    `first_row` on."""

    sequence: Sequence
    proposal: Proposal
    first_row: int

    @property
    def num_new(self) -> int:
        return len(self.proposal) + 1 - self.first_row


class SelfDrafter(Protocol):
    """Draws on what the target's steps compute. It holds nothing of a sequence that is gone.

    `source`: what it is called. `most_steps`: tokens in a line of its trees, at most. `uses_kv`: whether tokens of
    trees are computed over blocks of their sequences, behind the last committed token's place.
    """

    @property
    def source(self) -> str: ...

    @property
    def most_steps(self) -> int: ...

    @property
    def uses_kv(self) -> bool: ...

    def observe(
        self, plan: StepPlan, captured: Tensor | None, sampled: List[SampledTokens], followed: Collection[Sequence]
    ) -> None:
        """A step is computed. `captured` `[T, layers, hidden]`: what it was asked to keep of its packed tokens;
        `sampled`: what each scheduled sequence with rows gains, and has not taken in yet. `followed`: for whom it
        is worth its time to take in what only drafts need; a sequence that was left out so may stay out."""

    def keeps_up(self, sequence: Sequence) -> bool:
        """Whether it is told of steps of one that decodes although nobody in them is followed."""

    def num_lacking(self, sequence: Sequence) -> int:
        """Tokens of one that decodes which it would have to take in so as to be ready; 0 if it is, or cannot be."""

    def follow(self, sequences: List[Sequence]) -> None:
        """Takes in of these, which decode, some of what it lacks, so as to be ready later."""

    def ready(self, sequence: Sequence) -> bool:
        """Whether it can draft behind the sequence's last token, of which nothing is computed yet."""

    def begin(self, sequences: List[Sequence]) -> Tensor:
        """Logits `[S, vocab_size]` of what follows the last committed token of each."""

    def extend(self, growing: List[Growing]) -> Tensor:
        """Logits `[R, vocab_size]` of what follows each of the newest tokens, tree by tree."""
