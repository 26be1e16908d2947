"""Heads computed as their papers have it: dense, over a whole text at once, from weights by their published names."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

Weights = Mapping[str, Tensor]


def load_reference(target: Path) -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32, attn_implementation="eager")
    return model


@torch.no_grad()
def seen_by(model: Any, tokens: Sequence[int]) -> list[Tensor]:
    """`[T, hidden]` before each layer, and behind the last one and its norm."""
    return [each[0] for each in model(torch.tensor([list(tokens)]), output_hidden_states=True).hidden_states]


def medusa_logits(weights: Weights, hidden: Tensor, head: int, num_blocks: int) -> Tensor:
    """Of FasterDecoding's layout, `[hidden]` to `[V]`."""
    for block in range(num_blocks):
        name = f"{head}.{block}.linear"
        inner = weights[f"{name}.weight"] @ hidden + weights[f"{name}.bias"]
        hidden = hidden + inner * torch.sigmoid(inner)
    return weights[f"{head}.{num_blocks}.weight"] @ hidden


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight


def _rotated(x: Tensor, theta: float) -> Tensor:
    """`[S, heads, dim]` by positions 0 to S - 1, one after another."""
    dim = x.shape[-1]
    frequencies = theta ** (-torch.arange(0, dim, 2) / dim)
    angles = torch.arange(len(x)).unsqueeze(1) * frequencies
    cos, sin = angles.cos().unsqueeze(1), angles.sin().unsqueeze(1)
    a, b = x[..., : dim // 2], x[..., dim // 2 :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def _attention(weights: Weights, layer: str, x: Tensor, config: Any) -> Tensor:
    dim = config.head_dim
    query, key, value = (
        (x @ weights[f"{layer}self_attn.{each}_proj.weight"].T).view(len(x), -1, dim) for each in "qkv"
    )
    theta = config.rope_parameters["rope_theta"]
    query, key = _rotated(query, theta), _rotated(key, theta)
    fold = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(fold, 1), value.repeat_interleave(fold, 1)
    scores = torch.einsum("qhd,khd->hqk", query, key) / math.sqrt(dim)
    scores = scores.masked_fill(torch.ones(len(x), len(x), dtype=torch.bool).triu(1), -math.inf)
    attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value).flatten(1)
    return attended @ weights[f"{layer}self_attn.o_proj.weight"].T


def _mlp(weights: Weights, layer: str, x: Tensor) -> Tensor:
    gate = x @ weights[f"{layer}mlp.gate_proj.weight"].T
    return (gate * torch.sigmoid(gate) * (x @ weights[f"{layer}mlp.up_proj.weight"].T)) @ weights[
        f"{layer}mlp.down_proj.weight"
    ].T


@torch.no_grad()
def eagle_logits(
    weights: Weights, model: Any, tokens: Sequence[int], drafted: Sequence[int], *, layer: str = "layers.0."
) -> Tensor:
    """EAGLE-1: `[V]` of what follows `drafted`, which it drafted itself behind the committed `tokens`."""
    config = model.config
    eps = config.rms_norm_eps
    embeddings = weights.get("embed_tokens.weight", model.get_input_embeddings().weight)
    seen = seen_by(model, tokens[:-1])[-1]
    following = [*tokens[1:], *drafted]
    for _ in range(len(drafted) + 1):
        embedded = embeddings[following[: len(seen)]]
        x = torch.cat([embedded, seen], -1) @ weights["fc.weight"].T + weights.get("fc.bias", 0.0)
        x = x + _attention(weights, layer, x, config)
        out = x + _mlp(weights, layer, _norm(x, weights[f"{layer}post_attention_layernorm.weight"], eps))
        seen = torch.cat([seen, out[-1:]])
    logits: Tensor = model.get_output_embeddings()(out[-1])
    return logits


@torch.no_grad()
def eagle3_logits(
    weights: Weights,
    model: Any,
    tokens: Sequence[int],
    drafted: Sequence[int],
    *,
    states: Sequence[int],
    layer: str = "midlayer.",
    norm_before_residual: bool = False,
) -> Tensor:
    """EAGLE-3: `[V]` likewise, given the target's states before the layers `states`; minus infinity for tokens that it
    has none for."""
    config = model.config
    eps = config.rms_norm_eps
    every = seen_by(model, tokens[:-1])
    seen = torch.cat([every[i] for i in states], -1) @ weights["fc.weight"].T
    embeddings = weights.get("embed_tokens.weight", model.get_input_embeddings().weight)
    following = [*tokens[1:], *drafted]
    for _ in range(len(drafted) + 1):
        embedded = _norm(embeddings[following[: len(seen)]], weights[f"{layer}input_layernorm.weight"], eps)
        normal = _norm(seen, weights[f"{layer}hidden_norm.weight"], eps)
        past = normal if norm_before_residual else seen
        x = past + _attention(weights, layer, torch.cat([embedded, normal], -1), config)
        out = x + _mlp(weights, layer, _norm(x, weights[f"{layer}post_attention_layernorm.weight"], eps))
        seen = torch.cat([seen, out[-1:]])
    logits = weights["lm_head.weight"] @ _norm(out[-1], weights["norm.weight"], eps)
    whole = torch.full((config.vocab_size,), -math.inf)
    whole[torch.arange(len(logits)) + weights["d2t"]] = logits
    return whole
