"""Copies inside a target: what followed where a running sequence's text occurred before."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable

from shared.copying.copied import Copied
from shared.copying.suffix_source import Manuscript, SuffixSource
from shared.drafting.copied_draft import CopiedDraft
from shared.engine.sequence import Sequence
from shared.policy.looking import Looking

# Where close looks do not pay it is looked again, behind so many steps in a row that found nothing worth proposing,
# only when so many more tokens are there: a look takes 20 to 100 µs, and what begins to repeat itself does so
# for longer.
_BARREN_STEPS = 4
_TOKENS_APART = 16
# Tokens that are taken in before a step, of all sequences: everybody waits for that, some 2 µs a token.
_MOST_AT_ONCE = 4096


class Copies:
    """Manuscripts of the sequences of one engine that may have their drafts copied, kept as these go on."""

    def __init__(self, most_tokens: int, clock: Callable[[], float] = time.perf_counter) -> None:
        """It remembers so many tokens in all, of running sequences and past outputs; see `SuffixSource`."""
        self._source = SuffixSource(most_tokens)
        self._clock = clock
        self._num_left = _MOST_AT_ONCE
        # With how many tokens of the sequence it knows.
        self._manuscripts: dict[Sequence, tuple[Manuscript, int]] = {}
        # Of sequences that have gone, what there is still to take in.
        self._gone: deque[tuple[Manuscript, list[int]]] = deque()
        # Whom this step looked closely for, and the seconds that took.
        self._looked: dict[Sequence, tuple[Looking, float]] = {}
        # For whom something was found, and behind how many steps that had found nothing.
        self._num_barren: dict[Sequence, int] = {}

    def rests(self, sequence: Sequence) -> bool:
        """Whether it is too early to look again for a sequence for which nothing is found."""
        known = self._manuscripts.get(sequence)
        return known is not None and _may_rest(known[0]) and len(sequence.token_ids) - known[1] < _TOKENS_APART

    def draft(
        self,
        sequence: Sequence,
        most_depth: int,
        most_tokens: int,
        least_likelihood: float,
        branching: bool,
        always: bool = True,
    ) -> CopiedDraft:
        """What may follow the sequence's last token, in lines of at most `most_depth`; maybe nothing. Not `always`, it
        is looked for as closely as that pays."""
        began = self._clock()
        tokens = sequence.token_ids
        known = self._manuscripts.get(sequence)
        num_before = 0 if known is None else known[1]
        num_known = min(len(tokens), num_before + self._num_left)
        self._num_left -= num_known - num_before
        num_steps = 1
        if known is None:
            manuscript = self._source.begin(
                tokens[:num_known], sequence.num_prompt_tokens, sequence.root_hash, sequence.params.greedy
            )
        else:
            manuscript = known[0]
            if _may_rest(manuscript):
                num_steps = max(1, num_known - num_before)
            if num_known > num_before:
                self._source.commit(manuscript, tokens[num_before:num_known])
        self._manuscripts[sequence] = manuscript, num_known
        copied = Copied()
        if num_known == len(tokens):
            closely, num_barren = always or manuscript.looking.closely(num_steps), manuscript.num_barren
            copied = self._source.propose(
                manuscript, most_tokens, least_likelihood, branching, most_depth, closely, num_steps
            )
            if copied.proposal:
                self._num_barren[sequence] = num_barren
            if closely:
                self._looked[sequence] = manuscript.looking, self._clock() - began
        return CopiedDraft(copied)

    def pass_over(self, sequence: Sequence) -> None:
        """Of what was found for it nothing is verified: as if there had been nothing."""
        manuscript, _ = self._manuscripts[sequence]
        manuscript.num_barren = self._num_barren.get(sequence, 0) + 1

    def settle(self, worth: Callable[[Sequence, float], tuple[float, float]]) -> None:
        """The step has ended. `worth` tells of a sequence, and of the seconds that looking for it took, what that
        spared and spent: see `Looking`."""
        for sequence, (looking, seconds) in self._looked.items():
            looking.observe(*worth(sequence, seconds))
        self._looked.clear()

    def sweep(self, running: Iterable[Sequence] | None) -> None:
        """Before each step: those that are no longer here are past, and taken in one by one as there is time. None:
        the same are here as before the latest."""
        self._looked, self._num_barren, self._num_left = {}, {}, _MOST_AT_ONCE
        here = self._manuscripts if running is None else set(running)
        for sequence in [each for each in self._manuscripts if each not in here]:
            manuscript, num_known = self._manuscripts.pop(sequence)
            self._gone.append((manuscript, sequence.token_ids[num_known : num_known + _MOST_AT_ONCE]))
        while self._gone and self._num_left > 0:
            manuscript, rest = self._gone.popleft()
            self._source.commit(manuscript, rest)
            # What it wrote is indexed once more, as past.
            self._num_left -= len(rest) + len(manuscript.token_ids) - manuscript.num_prompt_tokens
            self._source.end(manuscript)
        self._num_left = max(0, self._num_left)


def _may_rest(manuscript: Manuscript) -> bool:
    return not manuscript.looking.pays and manuscript.num_barren >= _BARREN_STEPS
