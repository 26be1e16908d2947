"""Stop strings in a text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class StopScan(NamedTuple):
    """What one piece of text sets free: `text` may be sent; after `stopped` nothing more ever may."""

    text: str
    stopped: bool


class StopStrings:
    """Finds the stop string that ends first, however the text is cut into pieces.

    One Knuth-Morris-Pratt automaton per stop string: constant amortised time per character and stop string.
    Text that may be the beginning of a stop string is held until it is known.
    """

    def __init__(self, stop_strings: Sequence[str]) -> None:
        self._automata = [_Automaton(stop) for stop in stop_strings]
        self._held = ""

    @property
    def empty(self) -> bool:
        """Whether there is none to be found."""
        return not self._automata

    def push(self, text: str) -> StopScan:
        """Takes the next piece; the stop string and all after it are dropped."""
        if not self._automata:
            return StopScan(text, False)
        pending = self._held + text
        for end, char in enumerate(text, start=len(self._held) + 1):
            # Of those that end here the longest, which began first.
            matched = max(automaton.advance(char) for automaton in self._automata)
            if matched:
                self._held = ""
                return StopScan(pending[: end - matched], True)
        num_free = len(pending) - max(automaton.num_matched for automaton in self._automata)
        self._held = pending[num_free:]
        return StopScan(pending[:num_free], False)

    def flush(self) -> str:
        """What is still held, at the end of the text."""
        held, self._held = self._held, ""
        return held


class _Automaton:
    """Knuth-Morris-Pratt: `num_matched` is the longest suffix of the text so far that begins `pattern`."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self.num_matched = 0
        # borders[i]: length of the longest proper prefix of pattern[:i] that is also its suffix.
        self._borders = [0, 0]
        border = 0
        for char in pattern[1:]:
            while border and char != pattern[border]:
                border = self._borders[border]
            border += char == pattern[border]
            self._borders.append(border)

    def advance(self, char: str) -> int:
        """Takes one character; the pattern's length if that completes it, else 0."""
        while self.num_matched and char != self._pattern[self.num_matched]:
            self.num_matched = self._borders[self.num_matched]
        self.num_matched += char == self._pattern[self.num_matched]
        if self.num_matched < len(self._pattern):
            return 0
        self.num_matched = self._borders[-1]
        return len(self._pattern)
