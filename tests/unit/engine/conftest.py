"""A tiny random Llama, and what transformers generates with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from shared.engine.model import CausalLM
from tests.support.models import tiny_llama
from tests.support.tiny_engine import NUM_TOKENS, PROMPTS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="module")
def model(folder: Path) -> CausalLM:
    return CausalLM.load(str(folder), "cpu", "float32")


@pytest.fixture(scope="module")
def generated(folder: Path) -> dict[tuple[int, ...], list[int]]:
    """What transformers generates greedily for each prompt: prompt and output, 40 tokens or up to the end of text."""
    oracle: Any = LlamaForCausalLM.from_pretrained(folder)
    texts = {}
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        out = oracle.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NUM_TOKENS, pad_token_id=0
        )
        texts[prompt] = out[0].tolist()
    return texts
