"""Copies inside a target: what followed where a running sequence's text occurred before."""

from __future__ import annotations

from collections.abc import Callable, Collection

from shared.copying.copied import Copied
from shared.copying.suffix_source import Manuscript, SuffixSource
from shared.drafting.copied_draft import CopiedDraft
from shared.engine.sequence import Sequence
from shared.policy.looking import Looking

# Tokens of a long prompt that are taken in before a step: everybody waits for that, some 2 µs a token.
_MOST_AT_ONCE = 4096


class Copies:
    """Manuscripts of the sequences of one engine that may have their drafts copied, kept as these go on."""

    def __init__(self, most_tokens: int) -> None:
        """It remembers so many tokens in all, of running sequences and past outputs; see `SuffixSource`."""
        self._source = SuffixSource(most_tokens)
        # With how many tokens of the sequence it knows.
        self._manuscripts: dict[Sequence, tuple[Manuscript, int]] = {}
        # Whom this step looked closely for.
        self._looked: dict[Sequence, Looking] = {}

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
        tokens = sequence.token_ids
        known = self._manuscripts.get(sequence)
        num_known = min(len(tokens), (0 if known is None else known[1]) + _MOST_AT_ONCE)
        if known is None:
            manuscript = self._source.begin(tokens[:num_known], sequence.num_prompt_tokens, sequence.root_hash)
        else:
            manuscript = known[0]
            self._source.commit(manuscript, tokens[known[1] : num_known])
        self._manuscripts[sequence] = manuscript, num_known
        copied = Copied()
        if num_known == len(tokens):
            closely = always or manuscript.looking.closely()
            if closely:
                self._looked[sequence] = manuscript.looking
            copied = self._source.propose(manuscript, most_tokens, least_likelihood, branching, most_depth, closely)
        return CopiedDraft(manuscript, copied)

    def settle(self, seconds: float, worth: Callable[[Sequence, float], tuple[float, float]]) -> None:
        """The step has ended, for which looking took so long. `worth` tells of a sequence, and of what looking for it
        took, what that spared and spent: see `Looking`."""
        looked, self._looked = self._looked, {}
        for sequence, looking in looked.items():
            looking.observe(*worth(sequence, seconds / len(looked)))

    def sweep(self, running: Collection[Sequence]) -> None:
        """Those that are no longer here are past."""
        self._looked = {}
        for sequence in [each for each in self._manuscripts if each not in running]:
            manuscript, num_known = self._manuscripts.pop(sequence)
            self._source.commit(manuscript, sequence.token_ids[num_known : num_known + _MOST_AT_ONCE])
            self._source.end(manuscript)
