"""What greedy decoding by a target must give: transformers' own `generate`, in float32."""

from __future__ import annotations

import importlib
import inspect
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from shared.models import DEMO_TARGET

# A path with two logits closer than this may fork wherever sums are taken in another order.
_LEAST_MARGIN = 1e-3

_SOURCES = ("argparse", "ast", "calendar", "dataclasses", "difflib", "fractions", "inspect", "mailbox", "tarfile")


@dataclass(frozen=True, slots=True)
class Reference:
    """A prompt and the tokens that greedy decoding puts behind it, end-of-text tokens passed over."""

    prompt: tuple[int, ...]
    token_ids: list[int]


def references(model: Path, prompts: Iterable[Sequence[int]], count: int, num_tokens: int) -> list[Reference]:
    """The first `count` of `prompts`, all of one length, whose greedy path has no near ties."""
    target: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    target.generation_config.eos_token_id = None
    target.generation_config.pad_token_id = 0
    found: list[Reference] = []
    remaining = iter(prompts)
    while batch := list(itertools.islice(remaining, count)):
        input_ids = torch.tensor([list(prompt) for prompt in batch])
        with torch.inference_mode():
            result = target.generate(
                input_ids,
                attention_mask=torch.ones_like(input_ids),
                do_sample=False,
                max_new_tokens=num_tokens,
                return_dict_in_generate=True,
                output_logits=True,
            )
        best = torch.stack(result.logits, dim=1).topk(2).values
        margins = (best[..., 0] - best[..., 1]).amin(dim=1)
        for prompt, sequence, margin in zip(batch, result.sequences.tolist(), margins.tolist(), strict=True):
            if margin > _LEAST_MARGIN and len(found) < count:
                found.append(Reference(tuple(prompt), sequence[len(prompt) :]))
        if len(found) == count:
            return found
    raise AssertionError(f"only {len(found)} of these prompts have a greedy path without near ties")


def python_prompts(length: int) -> list[list[int]]:
    """Pieces of the standard library's source, of `length` tokens of the demo pair's vocabulary each."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO_TARGET)
    pieces = []
    for name in _SOURCES:
        # Twelve characters a token are more than enough.
        source = inspect.getsource(importlib.import_module(name))[1000 + 7 * length :][: 12 * length + 100]
        pieces.append(tokenizer(source).input_ids[:length])
    assert all(len(piece) == length for piece in pieces)
    return pieces
