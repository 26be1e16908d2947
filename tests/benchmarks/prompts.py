"""Fresh prompts: none begins as an earlier one did, so none finds its prefix cached."""

from __future__ import annotations

import random
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

from transformers import AutoTokenizer

Prompts = Callable[[int], list[int]]
"""Draws the next prompt, of so many tokens, as token ids."""

# A piece of source this long nearly always has the token wanted; where it has not, another is drawn.
_CHARACTERS_PER_TOKEN = 8


def random_prompts(vocab_size: int, seed: int) -> Prompts:
    """Uniformly random token ids, but for 0, the end of text."""
    generator = random.Random(seed)
    return lambda num_tokens: generator.choices(range(1, vocab_size), k=num_tokens)


def python_prompts(model: Path, seed: int) -> Prompts:
    """Pieces of the standard library's source, from random places on, in the tokens of `model`."""
    tokenizer = AutoTokenizer.from_pretrained(model, model_max_length=sys.maxsize)  # it would warn of long pieces
    texts = [path.read_text() for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))]
    generator = random.Random(seed)

    def draw(num_tokens: int) -> list[int]:
        num_characters = _CHARACTERS_PER_TOKEN * num_tokens
        long_enough = [text for text in texts if len(text) > 2 * num_characters]
        while True:
            text = generator.choice(long_enough)
            start = generator.randrange(len(text) - num_characters)
            token_ids: list[int] = tokenizer(text[start : start + num_characters]).input_ids[:num_tokens]
            if len(token_ids) == num_tokens:
                return token_ids

    return draw
