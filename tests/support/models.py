"""Checkpoints for tests: the demo pair, and tiny random models written where a test wants them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
)

from shared.models import DEMO_DRAFT, DEMO_TARGET

__all__ = ["DEMO_DRAFT", "DEMO_TARGET", "byte_tokenizer", "perturbed", "tiny_llama", "with_idle_last_layer"]

EOS = "<|endoftext|>"


def byte_tokenizer(vocab_size: int = 257) -> PreTrainedTokenizerFast:
    """One token a byte after the end-of-text token (id 0), printable ASCII first; at most 257 tokens.

    With fewer than 257, text that holds other bytes loses them.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([EOS, *alphabet][:vocab_size])}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token=EOS, pad_token=EOS)  # type: ignore[no-untyped-call]


def tiny_llama(
    path: Path,
    *,
    vocab_size: int = 257,
    seed: int = 0,
    hidden_size: int = 64,
    num_layers: int = 2,
    max_context: int = 512,
    sliding_window: int | None = None,
) -> Path:
    """Writes a random Llama with a byte tokenizer to `path`, in float32, and returns `path`.

    With a `sliding_window` it is a Mistral: all the same, but that a token sees no more than so many.

    Its next-token distributions are peaked enough that greedy decoding has no near ties. A
    `vocab_size` above 257 leaves ids the tokenizer does not know, as real checkpoints do.
    """
    fields: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": max_context,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": 0,
        "initializer_range": 0.1,
    }
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        if sliding_window is None:
            model: Any = LlamaForCausalLM(LlamaConfig(**fields))
        else:
            model = MistralForCausalLM(MistralConfig(**fields, sliding_window=sliding_window))
        model.model.embed_tokens.weight.normal_(0, 1)
        model.lm_head.weight.normal_(0, 3 / hidden_size**0.5)
    model.save_pretrained(path)
    byte_tokenizer(vocab_size).save_pretrained(path)
    return path


def perturbed(source: Path, path: Path, *, noise: float, seed: int = 0) -> Path:
    """Writes the checkpoint at `source` to `path` with Gaussian noise on every weight, and returns `path`.

    `noise` is in standard deviations of each weight tensor: 0 agrees with `source` always, 0.1
    mostly, 3 hardly ever. A drafter of chosen quality.
    """
    model = AutoModelForCausalLM.from_pretrained(source)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            scale = noise * weight.std() if weight.numel() > 1 else noise
            weight.add_(scale * torch.randn(weight.shape, generator=generator))
    model.save_pretrained(path)
    PreTrainedTokenizerFast.from_pretrained(source).save_pretrained(path)
    return path


def with_idle_last_layer(source: Path, path: Path) -> Path:
    """Writes the Llama at `source` to `path`, its last layer adding nothing, and returns `path`: what the layers before
    it say is what the model says."""
    model: Any = AutoModelForCausalLM.from_pretrained(source)
    last = model.model.layers[-1]
    with torch.no_grad():
        last.self_attn.o_proj.weight.zero_()
        last.mlp.down_proj.weight.zero_()
    model.save_pretrained(path)
    PreTrainedTokenizerFast.from_pretrained(source).save_pretrained(path)
    return path
