"""Which tokens a sequence holds, and how often: kept up to date, so that penalties need not read its history."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence


class TokenCounts:
    """Distinct tokens of one sequence's prompt and output, and their occurrences in the output.

    `ids` and `output_counts` run parallel, in no order, both int64: tensors can be made of them without a
    loop. Adding or removing a token costs the same however long the sequence is.
    """

    def __init__(self, token_ids: Sequence[int], num_prompt_tokens: int) -> None:
        output = Counter(token_ids[num_prompt_tokens:])
        self._prompt = frozenset(token_ids[:num_prompt_tokens])
        self.ids = array("q", self._prompt | output.keys())
        self.output_counts = array("q", [output[token] for token in self.ids])
        self._slots = {token: i for i, token in enumerate(self.ids)}

    def slot(self, token: int) -> int | None:
        """Where the token stands in `ids`."""
        return self._slots.get(token)

    def add(self, tokens: Sequence[int]) -> None:
        """Takes in tokens that were added to the output."""
        for token in tokens:
            slot = self._slots.setdefault(token, len(self.ids))
            if slot == len(self.ids):
                self.ids.append(token)
                self.output_counts.append(0)
            self.output_counts[slot] += 1

    def remove(self, tokens: Sequence[int]) -> None:
        """Takes out tokens that were dropped from the output: a drafter's rejected draws."""
        for token in tokens:
            slot = self._slots[token]
            self.output_counts[slot] -= 1
            if self.output_counts[slot] == 0 and token not in self._prompt:
                # The last one takes its place: what is left is all in the sequence.
                del self._slots[token]
                last, count = self.ids.pop(), self.output_counts.pop()
                if last != token:
                    self.ids[slot], self.output_counts[slot] = last, count
                    self._slots[last] = slot
