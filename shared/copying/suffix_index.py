"""Where the end of a text occurred before, and so what may follow it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

# An occurrence is found by the last tokens it has in common with the text: by so many, or if that finds none by fewer.
_ORDERS: Final = (6, 2)
# Of tokens that stand together so often, only the latest places are kept.
_MOST_PLACES: Final = 8
# One of these is found by the first of them alone.
LONG_MATCH: Final = _ORDERS[0]
# A longer match says no more.
LONGEST_MATCH: Final = 32
_END_BITS: Final = 32
_END: Final = (1 << _END_BITS) - 1


class Match(NamedTuple):
    """The last `length` tokens of what was looked for stand in a text, too, and end there at `end`.

    `repeats`: that text is the very one that was looked for, which then goes on as it did from there on, and again.
    """

    text_id: int
    text: Sequence[int]
    end: int
    length: int
    repeats: bool

    def next(self, offset: int) -> int | None:
        """What follows so many tokens behind it; None where the text ends."""
        at = self.end + offset
        if at < len(self.text):
            return self.text[at]
        return self.text[self.end + offset % (len(self.text) - self.end)] if self.repeats else None


class SuffixIndex:
    """Texts that may grow, by their n-grams (as LZ77 finds its matches: Ziv and Lempel 1977, and zlib's chains).

    A token costs a bounded number of dictionary entries and of steps, and so does a search, whatever the text: one
    token said a hundred thousand times is no worse than prose.
    """

    def __init__(self) -> None:
        self._texts: dict[int, list[int]] = {}
        # By hash of an n-gram: the texts that hold it and where it ends there, oldest first. Hashes may collide: a
        # match is counted token by token.
        self._places: dict[int, tuple[int, ...]] = {}

    def __len__(self) -> int:
        """How many texts there are."""
        return len(self._texts)

    def extend(self, text_id: int, token_ids: Sequence[int]) -> Sequence[int]:
        """Adds tokens to a text, which begins with its first; returns all of it."""
        text = self._texts.get(text_id)
        if text is None:
            text = self._texts[text_id] = []
        before = len(text)
        text += token_ids
        places, mark = self._places, text_id << _END_BITS
        for key, end in _grams(text, before):
            known = places.get(key)
            places[key] = (mark | end,) if known is None else (*known[1 - _MOST_PLACES :], mark | end)
        return text

    def drop(self, text_id: int) -> None:
        """Forgets a text."""
        text, mark = self._texts.pop(text_id), text_id << _END_BITS
        for key, end in _grams(text, 0):
            left = tuple(place for place in self._places.get(key, ()) if place != mark | end)
            if left:
                self._places[key] = left
            else:
                self._places.pop(key, None)

    def matches(self, tail: Sequence[int], shortest: int = 0) -> list[Match]:
        """Where texts go on behind the tokens that `tail` ends with: the longest matches first, of equal ones the
        latest, and none that is shorter than `shortest`. `tail` may be one of the texts itself."""
        longer = LONGEST_MATCH + 1
        for order in _ORDERS:
            # All that are at least as long as an order are found by it.
            if shortest >= longer:
                break
            longer = order
            places = self._places.get(_key(tail, len(tail), order)) if len(tail) >= order else None
            if places is None:
                continue
            found: list[Match] = []
            least = max(order, shortest)
            for place in reversed(places):
                text_id, end = place >> _END_BITS, place & _END
                text = self._texts[text_id]
                if end < len(text) and (length := _match_length(tail, text, end)) >= least:
                    found.append(Match(text_id, text, end, length, text is tail))
            if found:
                found.sort(key=lambda match: -match.length)
                return found
        return []


def _grams(text: Sequence[int], before: int) -> Iterator[tuple[int, int]]:
    """The keys of all n-grams that end behind the first `before` tokens, and where they end."""
    for order in _ORDERS:
        for end in range(max(before + 1, order), len(text) + 1):
            yield _key(text, end, order), end


def _key(text: Sequence[int], end: int, order: int) -> int:
    return hash(tuple(text[end - order : end]))


def _match_length(tail: Sequence[int], text: Sequence[int], end: int) -> int:
    """How many tokens before `end` are those that `tail` ends with."""
    most = min(len(tail), end, LONGEST_MATCH)
    for length in range(most):
        if tail[-1 - length] != text[end - 1 - length]:
            return length
    return most
