"""What one step of the engine computes."""

from __future__ import annotations

from dataclasses import dataclass, field

from shared.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """Tokens at positions start <= position < start + num_tokens of one sequence; `num_rows` logits at the
    end of them are sampled (0: a prefill chunk with more to come). Shared blocks it writes to are copied
    first: `copies` holds (source, destination)."""

    sequence: Sequence
    start: int
    num_tokens: int
    num_rows: int
    copies: list[tuple[int, int]]

    @property
    def parents(self) -> tuple[int, ...]:
        """Of the sequence's token tree, as far as it is computed behind this (see `Proposal.parents`)."""
        return self.sequence.proposal.parents[: max(0, self.start + self.num_tokens - len(self.sequence.token_ids))]


@dataclass(slots=True)
class StepPlan:
    """What one step computes."""

    scheduled: list[ScheduledSequence] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(item.num_tokens for item in self.scheduled)

    @property
    def prefills(self) -> list[tuple[Sequence, int]]:
        """Sequences with tokens that nothing is sampled after, of prompts, and how many these are."""
        return [
            (item.sequence, item.num_tokens - item.num_rows)
            for item in self.scheduled
            if item.num_tokens > item.num_rows
        ]

    @property
    def num_attended(self) -> tuple[int, int]:
        """Tokens that those of prompts attend to, one after another; and those in the contexts of all others, once
        each. What attention costs grows with both."""
        prompts, contexts = 0, 0
        for item in self.scheduled:
            if item.num_tokens > item.num_rows:
                prompts += item.num_tokens * item.start + item.num_tokens * (item.num_tokens + 1) // 2
            else:
                contexts += item.start + item.num_tokens
        return prompts, contexts

    @property
    def copies(self) -> list[tuple[int, int]]:
        return [copy for item in self.scheduled for copy in item.copies]
