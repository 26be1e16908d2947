"""Tiny random checkpoints of the model families whose attention differs, and of some that cannot be served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    GptOssConfig,
    MambaConfig,
    MiniMaxConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen3Config,
)

from tests.support.models import byte_tokenizer

VOCAB_SIZE = 257
_HIDDEN_SIZE = 64
# Small enough that a prompt of a few dozen tokens is several windows long.
_SLIDING_WINDOW = 8

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": _HIDDEN_SIZE,
    "num_hidden_layers": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
_ATTENTION: dict[str, Any] = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
}


def _config(family: str) -> PreTrainedConfig:
    decoder = _COMMON | _ATTENTION
    match family:
        case "qwen3":
            return Qwen3Config(**decoder)
        case "mistral":
            return MistralConfig(**decoder, sliding_window=_SLIDING_WINDOW)
        case "gemma2":
            return Gemma2Config(**decoder, sliding_window=_SLIDING_WINDOW, query_pre_attn_scalar=16)
        case "gpt_oss":
            return GptOssConfig(**decoder, sliding_window=_SLIDING_WINDOW, num_local_experts=4, num_experts_per_tok=2)
        case "gpt2":
            return GPT2Config(**_COMMON | {"num_attention_heads": 4})
        case "mamba":
            return MambaConfig(**_COMMON, state_size=8)
        case "minimax":
            return MiniMaxConfig(**decoder, num_local_experts=2, num_experts_per_tok=1)
    raise ValueError(f"no such family: {family}")


def tiny_checkpoint(family: str, path: Path, *, seed: int = 0, noise: float = 0.0) -> Path:
    """Writes a random float32 model of that family, with a byte tokenizer, to `path`, and returns `path`.

    `noise`, in standard deviations of each weight, makes a drafter of the model of the same seed.
    """
    make: Any = AutoModelForCausalLM.from_config
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = make(_config(family), dtype=torch.float32)
        # Peaked next-token distributions: greedy decoding has few near ties.
        model.get_input_embeddings().weight.normal_(0, 1)
        model.get_output_embeddings().weight.normal_(0, 3 / _HIDDEN_SIZE**0.5)
        for weight in model.parameters():
            if noise and weight.numel() > 1:
                weight.add_(noise * weight.std() * torch.randn_like(weight))
    model.save_pretrained(path)
    byte_tokenizer(VOCAB_SIZE).save_pretrained(path)
    return path
