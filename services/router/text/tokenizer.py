"""Text to token ids and back, with the target's own tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from shared.engine.tokenizer_fingerprint import load_tokenizer


class ChatTemplateError(ValueError):
    """Chat messages that the model's template does not accept; the message says why."""


class TextTokenizer:
    """A Hugging Face tokenizer as the router needs it.

    Encoding takes time in proportion to the text (about a second for some megabytes) and holds the
    calling thread: off the event loop, call it through `asyncio.to_thread`.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._decode = _decoder(tokenizer)
        special_ids = {id for id, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._text_ids = frozenset(tokenizer.get_vocab().values()) - special_ids - set(tokenizer.all_special_ids)

    @classmethod
    def load(cls, path_or_name: str) -> TextTokenizer:
        """The tokenizer of a local folder or hub name. Raises TokenizerLoadError."""
        return cls(load_tokenizer(path_or_name))

    @property
    def text_ids(self) -> frozenset[int]:
        """Ids that have text in an output: all but special tokens and what only the model's padded vocabulary holds."""
        return self._text_ids

    @property
    def has_chat_template(self) -> bool:
        return self._tokenizer.chat_template is not None

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of plain text, with the special tokens that the model expects around it."""
        return self._encode(text, add_special_tokens=True)

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> tuple[int, ...]:
        """Token ids of {"role", "content"} messages, up to where the assistant's answer begins.

        Raises ChatTemplateError for messages that the template refuses, or if the model has none.
        """
        if not self.has_chat_template:
            raise ChatTemplateError("the model has no chat template")
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
            )
        except (TemplateError, TypeError, ValueError) as error:
            # What a template raises on messages it was not written for.
            raise ChatTemplateError(str(error) or type(error).__name__) from error
        assert isinstance(text, str)
        # The template has written the special tokens itself.
        return self._encode(text, add_special_tokens=False)

    def _encode(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        # verbose=False: no warning when longer than the tokenizer's own idea of the context.
        return tuple(self._tokenizer(text, add_special_tokens=add_special_tokens, verbose=False).input_ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, just as the tokens spell it; special tokens have none, half a character is U+FFFD."""
        return self._decode(list(token_ids))


def _decoder(tokenizer: PreTrainedTokenizerBase) -> Callable[[list[int]], str]:
    """Its `decode` without special tokens and as is: of those that do no more than call the Rust library, that itself,
    as what lies between takes several times as long for a few tokens."""
    kind, base = type(tokenizer), PreTrainedTokenizerFast
    if isinstance(tokenizer, base) and (kind.decode, kind._decode) == (base.decode, base._decode):
        rust: Any = tokenizer.backend_tokenizer
        return partial(rust.decode, skip_special_tokens=True)

    def decode(token_ids: list[int]) -> str:
        text = tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    return decode
