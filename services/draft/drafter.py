"""One sequence on the draft worker: committed tokens, draws behind them, and the proposal asked for."""

from __future__ import annotations

import time
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field

from shared.engine.sequence import Sequence
from shared.sampling.sampled import Candidates, SampledTokens


@dataclass(eq=False)
class Drafter:
    """Drafts behind the committed tokens of `sequence`.

    `candidates` runs parallel to the sequence's draws. `num_asked` is how many draft tokens the router
    waits for, 0 when it waits for none.
    """

    sequence: Sequence
    candidates: list[Candidates | None] = field(default_factory=list)
    num_asked: int = 0
    asked_ns: int = 0

    def commit(self, base_length: int, token_ids: Tokens[int]) -> None:
        """Takes note of committed tokens; draws that continue them survive."""
        self.sequence.commit(base_length, token_ids)
        self.candidates = self.candidates[len(self.candidates) - self.sequence.num_drawn :]
        self.num_asked = 0

    def prefill(self) -> None:
        """Computes the KV of what is committed, short of the last token, which the first draw needs.

        Draws that survive have theirs, and may yet be no more.
        """
        self.sequence.num_steps = 0
        self.sequence.num_wanted_tokens = self.sequence.num_committed - 1

    def ask(self, num_draft_tokens: int) -> None:
        """Wants a proposal; what was drawn beforehand counts."""
        self.num_asked = num_draft_tokens
        self.asked_ns = time.time_ns()
        self.sequence.num_steps = max(0, num_draft_tokens - self.sequence.num_drawn)
        self.sequence.draws_on = True

    def take(self, sampled: SampledTokens) -> None:
        """Takes in one draw of the sequence's."""
        self.candidates.append(sampled.candidates)

    @property
    def answerable(self) -> bool:
        return 0 < self.num_asked <= self.sequence.num_drawn

    def answer(self) -> tuple[list[int], list[Candidates | None]]:
        """The proposal asked for: its token ids and what they were drawn from."""
        start, count = self.sequence.num_committed, self.num_asked
        self.num_asked = 0
        return self.sequence.token_ids[start : start + count], self.candidates[:count]

    def guess_on(self, num_draft_tokens: int) -> None:
        """Continues on the guess that the whole answer is accepted: its bonus token, then the next draft."""
        self.sequence.num_steps = num_draft_tokens + 1
        # What is committed meanwhile may end it.
        self.sequence.draws_on = False
