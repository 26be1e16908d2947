"""Heads for a model's target in every layout they are published in, with random or chosen weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig

Weights = dict[str, Tensor]


def _noise(*size: int) -> Tensor:
    noise: Tensor = torch.randn(size) * size[-1] ** -0.5
    return noise


def config_of(target: Path) -> PretrainedConfig:
    config: PretrainedConfig = AutoConfig.from_pretrained(target).get_text_config()
    return config


def medusa_weights(config: Any, num_heads: int, num_blocks: int = 1, layout: str = "original") -> Weights:
    """`layout`: original, prefixed (as in whole checkpoints) or vllm."""
    weights = {}
    hidden = config.hidden_size
    for head in range(num_heads):
        for block in range(num_blocks):
            name = f"blocks.{head}.layers.{block}" if layout == "vllm" else f"{head}.{block}.linear"
            weights[f"{name}.weight"] = _noise(hidden, hidden)
            if layout != "vllm":
                weights[f"{name}.bias"] = _noise(hidden)
        out = f"lm_heads.{head}.weight" if layout == "vllm" else f"{head}.{num_blocks}.weight"
        weights[out] = _noise(config.vocab_size, hidden)
    prefix = "medusa_head." if layout == "prefixed" else ""
    return {prefix + name: tensor for name, tensor in weights.items()}


def write_medusa(folder: Path, weights: Weights, *, pickled: bool = False, num_heads_said: int = 5) -> Path:
    """`num_heads_said`: what its config says, which published ones get wrong."""
    folder.mkdir(parents=True, exist_ok=True)
    said = {"medusa_num_heads": num_heads_said, "medusa_num_layers": 1}
    (folder / "config.json").write_text(json.dumps(said))
    if pickled:
        torch.save(weights, folder / "medusa_lm_head.pt")
    else:
        save_file(weights, folder / "medusa_lm_head.safetensors")
    return folder


def layer_weights(config: Any, prefix: str, inputs: int) -> Weights:
    """Of a Llama layer whose attention is given so many numbers, but for its norms before that."""
    hidden, heads, mlp = config.hidden_size, config.num_attention_heads, config.intermediate_size
    dim = getattr(config, "head_dim", None) or hidden // heads
    kv = config.num_key_value_heads * dim
    return {
        f"{prefix}self_attn.q_proj.weight": _noise(heads * dim, inputs),
        f"{prefix}self_attn.k_proj.weight": _noise(kv, inputs),
        f"{prefix}self_attn.v_proj.weight": _noise(kv, inputs),
        f"{prefix}self_attn.o_proj.weight": _noise(hidden, heads * dim),
        f"{prefix}post_attention_layernorm.weight": 1 + 0.1 * _noise(hidden),
        f"{prefix}mlp.gate_proj.weight": _noise(mlp, hidden),
        f"{prefix}mlp.up_proj.weight": _noise(mlp, hidden),
        f"{prefix}mlp.down_proj.weight": _noise(hidden, mlp),
    }


def eagle_weights(config: Any, *, bias: bool = True, embedding: bool = False) -> Weights:
    """EAGLE-1, as its authors publish it."""
    hidden = config.hidden_size
    weights = layer_weights(config, "layers.0.", hidden) | {"fc.weight": _noise(hidden, 2 * hidden)}
    if bias:
        weights["fc.bias"] = 0.1 * _noise(hidden)
    if embedding:
        weights["embed_tokens.weight"] = _noise(config.vocab_size, hidden)
    return weights


def eagle3_weights(config: Any, draft_vocab_size: int, num_states: int = 3, layer: str = "midlayer.") -> Weights:
    """EAGLE-3: `layer` is `layers.0.` in the speculators' layout. d2t holds offsets, to every second token."""
    hidden = config.hidden_size
    token_ids = torch.arange(draft_vocab_size) * (config.vocab_size // draft_vocab_size)
    of_draft = torch.zeros(config.vocab_size, dtype=torch.bool)
    of_draft[token_ids] = True
    return layer_weights(config, layer, 2 * hidden) | {
        f"{layer}input_layernorm.weight": 1 + 0.1 * _noise(hidden),
        f"{layer}hidden_norm.weight": 1 + 0.1 * _noise(hidden),
        "norm.weight": 1 + 0.1 * _noise(hidden),
        "fc.weight": _noise(hidden, num_states * hidden),
        "lm_head.weight": _noise(draft_vocab_size, hidden),
        "d2t": token_ids - torch.arange(draft_vocab_size),
        "t2d": of_draft,
    }


def layer_config(config: Any) -> dict[str, Any]:
    """What a head's config says of its layer, in the fields that were usual when they were published."""
    rope = getattr(config, "rope_parameters", None) or {"rope_theta": 10000.0}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        "num_hidden_layers": 1,
        "rms_norm_eps": getattr(config, "rms_norm_eps", 1e-6),
        "rope_theta": rope.get("rope_theta", 10000.0),
        "vocab_size": config.vocab_size,
        "hidden_act": "silu",
    }


def write_head(folder: Path, weights: Weights, config: dict[str, Any], *, pickled: bool = False) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    weights = {name: tensor.contiguous() for name, tensor in weights.items()}
    if pickled:
        torch.save(weights, folder / "pytorch_model.bin")
    else:
        save_file(weights, folder / "model.safetensors")
    return folder


def speculators_config(config: Any, kind: str, **options: Any) -> dict[str, Any]:
    return {
        "speculators_model_type": kind,
        "speculators_config": {"algorithm": kind, "verifier": {"architectures": ["LlamaForCausalLM"]}},
        "transformer_layer_config": layer_config(config),
        **options,
    }
