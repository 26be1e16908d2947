"""Output tokens of one sequence, as they are committed, to text that can be sent at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from services.router.text.stop_strings import StopStrings
from services.router.text.tokenizer import TextTokenizer

# How bytes decode that are not (yet) a character.
_REPLACEMENT = "\ufffd"
# Tokens of context that decide a token's leading space and joined bytes: a UTF-8 character has at most 4
# bytes, and a token at least one.
_CONTEXT_TOKENS = 4
# Tokens held for half a character before it counts as broken: those that may share bytes with it, twice.
_MAX_HELD_TOKENS = 2 * _CONTEXT_TOKENS


class TextDelta(NamedTuple):
    """New text; `stopped` by a stop string within the first `num_tokens` of the tokens pushed (else all of them)."""

    text: str
    stopped: bool
    num_tokens: int


class Detokenizer:
    """Incremental detokenization: the pieces joined are the text of all tokens, up to a stop string.

    A window of tokens is decoded with each new one, and what is new in its text is sent: a token's text
    depends on its neighbours (a SentencePiece token loses its leading space when it stands first; a
    character may spread over tokens). Text is held while it ends in half a character, or in what may be
    the beginning of a stop string. Bytes that are no UTF-8 become U+FFFD and hold nothing up for long.

    `prompt_ids`: the prompt, whose last tokens are the context of the first output token.
    """

    def __init__(
        self, tokenizer: TextTokenizer, stop_strings: Sequence[str] = (), prompt_ids: Sequence[int] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._stop_strings = StopStrings(stop_strings)
        # The first _num_read tokens of the window are context; the first _num_sent characters of its text are sent.
        self._window: list[int]
        self._num_read: int
        self._num_sent: int
        self._restart_window(list(prompt_ids[-_CONTEXT_TOKENS:]), num_held=0)

    @property
    def may_stop(self) -> bool:
        """Whether there are stop strings."""
        return not self._stop_strings.empty

    def push(self, token_ids: Sequence[int]) -> TextDelta:
        """Takes the next output tokens, without a stop token. After `stopped` no more may be pushed."""
        pieces: list[str] = []
        for count, token_id in enumerate(token_ids, start=1):
            scan = self._stop_strings.push(self._decode_next(token_id))
            pieces.append(scan.text)
            if scan.stopped:
                return TextDelta("".join(pieces), True, count)
        return TextDelta("".join(pieces), False, len(token_ids))

    def flush(self) -> TextDelta:
        """What was held, when the sequence ends without a stop string. No more may be pushed after it."""
        scan = self._stop_strings.push(self._tokenizer.decode(self._window)[self._num_sent :])
        self._window = []
        self._num_sent = 0
        return TextDelta(scan.text if scan.stopped else scan.text + self._stop_strings.flush(), scan.stopped, 0)

    def _decode_next(self, token_id: int) -> str:
        if token_id not in self._tokenizer.text_ids:
            return ""
        self._window.append(token_id)
        text = self._tokenizer.decode(self._window)
        incomplete = text.endswith(_REPLACEMENT)
        if (incomplete or len(text) <= self._num_sent) and len(self._window) - self._num_read < _MAX_HELD_TOKENS:
            return ""
        if incomplete:
            # Of broken bytes only the last U+FFFD can still become a character.
            delta = text[self._num_sent : -1]
            self._restart_window(self._window[-_CONTEXT_TOKENS:], num_held=1)
        else:
            delta = text[self._num_sent :]
            self._restart_window(self._window[self._num_read :], num_held=0)
        return delta

    def _restart_window(self, token_ids: list[int], num_held: int) -> None:
        """Lets `token_ids` be the context, with all but the last `num_held` characters of their text sent."""
        self._window = token_ids
        self._num_read = len(token_ids)
        self._num_sent = len(self._tokenizer.decode(token_ids)) - num_held
