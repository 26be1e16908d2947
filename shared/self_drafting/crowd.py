"""Who is there before a step of an engine that drafts for itself."""

from __future__ import annotations

from collections.abc import Sequence as List
from typing import NamedTuple

from shared.engine.sequence import Sequence
from shared.self_drafting.growth import is_fixed


class Crowd(NamedTuple):
    """Stays the same until somebody comes or goes: steps may be a millisecond apart.

    `decoding`, and who will soon be, `coming`. Of those that decode: `wanting` may have something drafted here,
    `drafting` have a drafter do so, of these `fixed` whatever that brings, and `free` what pays; `copying` may have
    copies. `sampled`: whether most of whom a drafter's pays for are, with those that come; None if there are none.
    """

    decoding: List[Sequence]
    coming: List[Sequence]
    wanting: List[Sequence]
    drafting: List[Sequence]
    fixed: List[Sequence]
    free: List[Sequence]
    copying: List[Sequence]
    sampled: bool | None

    @classmethod
    def of(cls, decoding: List[Sequence], coming: List[Sequence]) -> Crowd:
        wanting = [each for each in decoding if each.params.self_draft is not None]
        drafting = [each for each in wanting if may_have(each, "target")]
        free = [each for each in drafting if not is_fixed(each)]
        deciding = [*free, *filter(is_free, coming)]
        return cls(
            decoding,
            coming,
            wanting,
            drafting,
            [each for each in drafting if is_fixed(each)],
            free,
            [each for each in wanting if may_have(each, "suffix")],
            2 * sum(not each.params.greedy for each in deciding) > len(deciding) if deciding else None,
        )

    @property
    def size(self) -> int:
        """With those that come: of a burst the first do not draft as if they were alone."""
        return len(self.decoding) + len(self.coming)


def may_have(sequence: Sequence, source: str) -> bool:
    wanted = sequence.params.self_draft
    return wanted is not None and (not wanted.sources or source in wanted.sources)


def is_free(sequence: Sequence) -> bool:
    """Whether it may have of a drafter what pays."""
    return may_have(sequence, "target") and not is_fixed(sequence)
