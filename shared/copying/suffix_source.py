"""Draft tokens without a model: what followed the text's end where it occurred before, in it or in a past output."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from shared.copying.copied import Copied, copy, most_likely
from shared.copying.past_outputs import PastOutputs
from shared.copying.suffix_index import LONG_MATCH, LONGEST_MATCH, SuffixIndex
from shared.policy.calibration import Calibration
from shared.policy.looking import Looking

_OWN_TEXT = 0
_NOTHING = Copied()
# Less than any match has turned out to be worth: not looked at more closely.
_LEAST_DOUBTED = 0.2
# While nothing is worth proposing all that there is is looked at in one step of so many, to learn whether it would be.
_STEPS_APART = 32
# Of matches, those that differ in what experience has of them.
_LENGTHS = (2, 3, 4, 6, 9)


@dataclass(eq=False)
class Manuscript:
    """A sequence's committed tokens: `index` holds them as its one text; None where there is no room for them.

    `proposed` is what was copied for it last, until its outcome is known, whether it was verified or not; `looking`:
    how closely that is worth to look for; `num_barren`: steps in a row that found nothing worth proposing.
    """

    tenant: bytes
    num_prompt_tokens: int
    calibration: Calibration
    looking: Looking
    index: SuffixIndex | None
    token_ids: Sequence[int] = ()
    proposed: Copied | None = None
    num_barren: int = 0


class SuffixSource:
    """Copies from a sequence's own prompt and output, and from past outputs of its tenant (prompt lookup, Saxena 2023;
    SuffixDecoding, Oliaro et al. 2024).

    It remembers `most_tokens` in all: running sequences' first, of one tenant half of it at most, and of past outputs
    those used last. A sequence for which there is no room has nothing copied.
    """

    def __init__(self, most_tokens: int) -> None:
        self._most_tokens = most_tokens
        self._num_running_tokens = 0
        self._running_by_tenant: Counter[bytes] = Counter()
        self._past = PastOutputs()
        # Of sequences that are greedy, and of the others, whose tokens are harder to foresee.
        self._experience = {greedy: (Calibration(), Looking()) for greedy in (True, False)}

    @property
    def num_tokens(self) -> int:
        """Remembered by now."""
        return self._num_running_tokens + self._past.num_tokens

    def begin(self, token_ids: Sequence[int], num_prompt_tokens: int, tenant: bytes, greedy: bool = True) -> Manuscript:
        """A sequence comes, with what is committed of it."""
        calibration, looking = self._experience[greedy]
        manuscript = Manuscript(tenant, num_prompt_tokens, Calibration(calibration), Looking(looking), SuffixIndex())
        self._extend(manuscript, token_ids)
        return manuscript

    def commit(self, manuscript: Manuscript, token_ids: Sequence[int]) -> None:
        """These follow, whatever was proposed."""
        proposed, manuscript.proposed = manuscript.proposed, None
        if proposed is not None:
            proposed.observe(token_ids, manuscript.calibration)
        self._extend(manuscript, token_ids)

    def end(self, manuscript: Manuscript) -> None:
        """The sequence goes; its output is past."""
        if manuscript.index is not None:
            self._give_up(manuscript)
            self._past.add(manuscript.tenant, manuscript.token_ids[manuscript.num_prompt_tokens :])
            self._past.trim(self._most_tokens - self._num_running_tokens)

    def propose(
        self,
        manuscript: Manuscript,
        most_tokens: int,
        least_likelihood: float = 0.0,
        branching: bool = False,
        most_depth: int | None = None,
        closely: bool = True,
        num_steps: int = 1,
    ) -> Copied:
        """What may follow; nothing where the text's end is new, or not `closely`, where what it has in common with what
        is remembered is short. `num_steps`: this one and those before it that did not look. See `copy`.

        What such tokens are worth is learnt from all of it by what is committed next, and, so that nothing is held to
        be worthless for ever, now and then from what was not worth proposing.
        """
        if manuscript.index is None:
            return _NOTHING

        def look(least: float, shortest: int) -> Copied:
            assert manuscript.index is not None
            tail = manuscript.token_ids
            matches = manuscript.index.matches(tail, shortest) + self._past.matches(manuscript.tenant, tail, shortest)
            if not matches:
                return _NOTHING
            return copy(matches, most_tokens, least, manuscript.calibration, branching, most_depth)

        shortest = max(_shortest_match(manuscript.calibration, least_likelihood), 0 if closely else LONG_MATCH)
        found = look(least_likelihood, shortest)
        if found.proposal:
            manuscript.num_barren, manuscript.proposed = 0, found
            return found
        before, manuscript.num_barren = manuscript.num_barren, manuscript.num_barren + num_steps
        is_due = before // _STEPS_APART != manuscript.num_barren // _STEPS_APART
        if is_due and (least_likelihood > 0 or shortest > 0):
            manuscript.proposed = look(0.0, 0)
        return _NOTHING

    def _extend(self, manuscript: Manuscript, token_ids: Sequence[int]) -> None:
        if manuscript.index is None:
            return
        num_new, tenant = len(token_ids), manuscript.tenant
        if 2 * (self._running_by_tenant[tenant] + num_new) > self._most_tokens or (
            self._num_running_tokens + num_new > self._most_tokens
        ):
            self._give_up(manuscript)
            return
        self._num_running_tokens += num_new
        self._running_by_tenant[tenant] += num_new
        self._past.trim(self._most_tokens - self._num_running_tokens)
        manuscript.token_ids = manuscript.index.extend(_OWN_TEXT, token_ids)

    def _give_up(self, manuscript: Manuscript) -> None:
        num_tokens, tenant = len(manuscript.token_ids), manuscript.tenant
        self._num_running_tokens -= num_tokens
        self._running_by_tenant[tenant] -= num_tokens
        if not self._running_by_tenant[tenant]:
            del self._running_by_tenant[tenant]
        manuscript.index = None


def _shortest_match(calibration: Calibration, least_likelihood: float) -> int:
    """No shorter one can tell of a token that is so likely, as far as experience goes."""
    if least_likelihood <= _LEAST_DOUBTED:
        return 0
    for length in _LENGTHS:
        if calibration.likelihood(most_likely(length)) >= least_likelihood:
            return length
    return LONGEST_MATCH + 1
