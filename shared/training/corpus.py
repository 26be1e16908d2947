"""Text to train on, as the target's tokens."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shared.settings import StartupError

# Of the files' text so much is held out, and so many tokens at most.
_HELD_OUT_SHARE = 0.03
_MOST_HELD_OUT = 50_000
# A text shorter than this many windows teaches nothing.
_LEAST_WINDOWS = 8
# What a file may be to be read as text, in bytes.
_MOST_FILE_BYTES = 1 << 24


class Corpus(NamedTuple):
    """Tokens one text behind the other, `[N]` int64: those to train on, and those held out."""

    train: Tensor
    held_out: Tensor

    def batches(self, num_rows: int, length: int, seed: int, first: int = 0) -> Iterator[Tensor]:
        """Random windows `[num_rows, length]` without end, the same for the same seed; the first so many are left
        out."""
        generator = torch.Generator().manual_seed(seed)
        for index in range(1 << 62):
            starts = torch.randint(len(self.train) - length + 1, (num_rows,), generator=generator)
            if index >= first:
                yield torch.stack([self.train[start : start + length] for start in starts.tolist()])


def read_texts(folder: Path, pattern: str, seed: int) -> list[str]:
    """All files below `folder` whose names match `pattern`, in an order that `seed` gives. Raises
    StartupError for a folder or a pattern that is none."""
    if not folder.is_dir():
        raise StartupError(f"text {folder} is no folder")
    try:
        found = [path for path in folder.rglob(pattern) if path.is_file()]
    except (NotImplementedError, ValueError) as error:
        raise StartupError(f"pattern {pattern} matches no names: {error}") from error
    paths = sorted(path for path in found if path.stat().st_size <= _MOST_FILE_BYTES)
    random.Random(seed).shuffle(paths)
    return [path.read_text(encoding="utf-8", errors="ignore") for path in paths]


def corpus_of(texts: Iterable[str], tokenizer: Any, length: int) -> Corpus:
    """These texts, the first of them held out. Raises StartupError if they are too few tokens for windows of
    `length`."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    tokens: list[int] = []
    for text in texts:
        tokens += tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] + end
    return split(torch.tensor(tokens, dtype=torch.int64), length)


def split(tokens: Tensor, length: int) -> Corpus:
    """Holds the first of the tokens out. Raises StartupError if they are too few."""
    num_held_out = min(int(len(tokens) * _HELD_OUT_SHARE), _MOST_HELD_OUT)
    num_held_out = max(num_held_out, length)
    if len(tokens) < num_held_out + _LEAST_WINDOWS * length:
        raise StartupError(
            f"the text to train on has {len(tokens)} tokens: {num_held_out + _LEAST_WINDOWS * length} are needed"
        )
    return Corpus(tokens[num_held_out:], tokens[:num_held_out])
