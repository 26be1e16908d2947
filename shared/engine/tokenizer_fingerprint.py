"""Loading a tokenizer, and naming its vocabulary so that a target and its drafter can be compared."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from shared.engine.source import check_source
from shared.settings import StartupError

_MAX_REASON_CHARS = 300


class TokenizerLoadError(StartupError):
    """A tokenizer that cannot be loaded; the message is one line that names it and the reason."""


def load_tokenizer(path_or_name: str) -> PreTrainedTokenizerBase:
    """The Hugging Face tokenizer of a local folder or hub name. Raises TokenizerLoadError, StartupError."""
    check_source(path_or_name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path_or_name)
    except Exception as error:  # a broken tokenizer.json raises no narrower type
        # All of it in one line: some messages say what is wrong in the second.
        reason = " ".join(str(error).split())[:_MAX_REASON_CHARS] or type(error).__name__
        raise TokenizerLoadError(f"cannot load the tokenizer of {path_or_name!r}: {reason}") from error
    if not isinstance(tokenizer, PreTrainedTokenizerBase) or len(tokenizer) == 0:
        raise TokenizerLoadError(f"cannot load the tokenizer of {path_or_name!r}: it has no vocabulary")
    return tokenizer


def tokenizer_fingerprint(path_or_name: str) -> str:
    """SHA-256 (hex) of the vocabulary of a folder's or hub name's tokenizer. Raises TokenizerLoadError.

    Equal fingerprints mean that every token id has the same text in both models, which is what
    speculation needs: only ids and probabilities by id travel between them.
    """
    return vocabulary_fingerprint(load_tokenizer(path_or_name).get_vocab())


def vocabulary_fingerprint(vocabulary: Mapping[str, int]) -> str:
    """SHA-256 (hex) over the (token, id) pairs sorted by token.

    A pair is hashed as the token's length in bytes and its id, both little-endian uint32, then its UTF-8.
    """
    digest = hashlib.sha256()
    for token, token_id in sorted(vocabulary.items()):
        token_bytes = token.encode("utf-8", "surrogatepass")
        digest.update(struct.pack("<II", len(token_bytes), token_id))
        digest.update(token_bytes)
    return digest.hexdigest()
