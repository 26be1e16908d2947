"""EAGLE-1 and EAGLE-3 heads as they are published: SafeAILab's layout, and the speculators'."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from shared.engine.model import CausalLM
from shared.self_drafting.eagle import EagleHead, EagleShape
from shared.self_drafting.head_files import HeadFiles

# What the layer, and what is around it, is called.
_LAYER_NAMES = ("midlayer.", "layers.0.", "transformer.")
_OTHER_NAMES = {
    "fusion_fc": "fc",
    "embedding_layernorm": "embed_layernorm",
    "pre_lm_head_layernorm": "lm_head_layernorm",
    "hidden_layernorm": "layer.input_layernorm",
}
# What newer heads may have that this one does not compute: each would ruin its guesses in silence.
_UNKNOWN_OPTIONS = ("norm_before_fc", "fc_norm", "norm_output")
# All of a layer's config that counts. The rest, of which transformers makes what it pleases (a table of names by a
# number of labels), is left.
_LAYER_OPTIONS = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "hidden_act", "mlp_bias", "rms_norm_eps", "max_position_embeddings", "rope_theta", "rope_scaling",
    "rope_parameters", "partial_rotary_factor",
)  # fmt: skip
# Which states an EAGLE-3 is given where its config does not say: early, in the middle and late.
_EARLY, _LATE = 2, 3


def eagle_head(files: HeadFiles, model: CausalLM) -> EagleHead:
    """The head for that model, in its type and on its device. Raises StartupError if it is for another one, or not
    whole."""
    weights = {_canonical(name): tensor for name, tensor in files.weights.items()}
    weights.pop("t2d", None)  # which tokens d2t names
    offsets = weights.pop("d2t", None)
    shape = _shape(files, weights, model)
    with torch.device("meta"):
        head = EagleHead(shape)
    try:
        head.load_state_dict(_state(files, weights, shape), assign=True)
    except RuntimeError as error:
        raise files.error(f"does not fit {model.name}: {' '.join(str(error).split())[:400]}") from error
    head = head.to(model.device, model.dtype).eval()
    rotary: Any = LlamaRotaryEmbedding(shape.config)  # which stays in float32
    head.rotary = rotary.to(model.device)
    if offsets is not None:
        head.token_ids = _token_ids(files, offsets, shape, model).to(model.device)
    elif shape.draft_vocab_size != model.vocab_size:
        raise files.error(f"has logits of {shape.draft_vocab_size} tokens and no d2t that says which they are")
    return head


def fingerprint(files: HeadFiles) -> str:
    """Tells heads apart, as blocks hold their KV, too."""
    digest = hashlib.sha256()
    for name, tensor in sorted(files.weights.items()):
        flat = tensor.flatten()
        digest.update(f"{name} {tuple(tensor.shape)}".encode())
        digest.update(flat[:: flat.numel() // 64 | 1].to(torch.float32).numpy().tobytes())
    return digest.hexdigest()[:32]


def _canonical(name: str) -> str:
    name = name.removeprefix("model.")
    for layer in _LAYER_NAMES:
        if name.startswith(layer):
            return "layer." + name.removeprefix(layer)
    stem, _, what = name.rpartition(".")
    return f"{_OTHER_NAMES[stem]}.{what}" if stem in _OTHER_NAMES else name


def _shape(files: HeadFiles, weights: dict[str, Tensor], model: CausalLM) -> EagleShape:
    raw = files.config
    if not raw or "fc.weight" not in weights or "layer.self_attn.q_proj.weight" not in weights:
        raise files.error("is neither a Medusa nor an EAGLE: it lacks config.json, fc.weight or an attention layer")
    for option in _UNKNOWN_OPTIONS:
        if raw.get(option):
            raise files.error(f"has {option} set, which is not supported")
    norm_before_residual = raw.get("norm_before_residual", False)
    if not isinstance(norm_before_residual, bool):
        raise files.error(f"has norm_before_residual {norm_before_residual!r}: it must be true or false")
    layer: dict[str, Any] = raw.get("transformer_layer_config", raw)
    config = LlamaConfig(**{option: layer[option] for option in _LAYER_OPTIONS if option in layer})
    rope = config.rope_parameters or {}
    theta, rotated = float(rope.get("rope_theta") or 0.0), rope.get("partial_rotary_factor", 1.0)
    if config.hidden_act != "silu" or config.mlp_bias or not (math.isfinite(theta) and theta > 0) or rotated != 1:
        raise files.error(
            f"has hidden_act {config.hidden_act}, mlp_bias {config.mlp_bias}, rope_theta {theta} and "
            f"partial_rotary_factor {rotated}: silu, false, more than 0 and 1 are supported"
        )
    if config.num_hidden_layers != 1:
        raise files.error(f"has {config.num_hidden_layers} layers: one is supported")
    eagle3 = "layer.hidden_norm.weight" in weights
    fused = weights["fc.weight"].shape[1]
    if eagle3:
        captured = raw.get("eagle_aux_hidden_state_layer_ids") or usual_layers(model.num_layers)
        if not all(0 <= each <= model.num_layers for each in captured):
            raise files.error(f"sees layers {captured}, where {model.name} has {model.num_layers}")
        expected = len(captured) * model.hidden_size
    else:
        captured, expected = [model.num_layers], 2 * config.hidden_size
    if fused != expected or (not eagle3 and config.hidden_size != model.hidden_size):
        raise files.error(
            f"is given {fused} numbers for a token, where {model.name}, of hidden size {model.hidden_size}, has"
            f" {expected}"
        )
    kv, dim = model.kv_shape, config.head_dim
    if (config.num_key_value_heads, dim, dim) != (kv.num_kv_heads, kv.key_head_dim, kv.value_head_dim):
        raise files.error(
            f"has {config.num_key_value_heads} KV heads of {dim}, and its blocks are those of {model.name}, which has "
            f"{kv.num_kv_heads} of {kv.key_head_dim}"
        )
    if config.num_attention_heads < 1 or config.num_attention_heads % kv.num_kv_heads:
        raise files.error(
            f"has {config.num_attention_heads} attention heads, no multiple of its {kv.num_kv_heads} of KV"
        )
    own_out, own_embedding = "lm_head.weight" in weights, "embed_tokens.weight" in weights
    draft_vocab_size = weights["lm_head.weight"].shape[0] if own_out else model.vocab_size
    if not (own_out and own_embedding) and config.hidden_size != model.hidden_size:
        raise files.error(f"has no lm_head or no embed_tokens, and another hidden size than {model.name}")
    if own_embedding and weights["embed_tokens.weight"].shape[0] < model.vocab_size:
        raise files.error(f"embeds {weights['embed_tokens.weight'].shape[0]} tokens of the {model.vocab_size}")
    if own_embedding:
        config.vocab_size = weights["embed_tokens.weight"].shape[0]
    return EagleShape(
        kind="eagle3" if eagle3 else "eagle",
        config=config,
        captured_layers=tuple(captured),
        target_hidden=model.hidden_size,
        head_dim=kv.key_head_dim,
        num_kv_heads=kv.num_kv_heads,
        draft_vocab_size=draft_vocab_size,
        norms_input="layer.input_layernorm.weight" in weights,
        norms_token="embed_layernorm.weight" in weights,
        norms_output="lm_head_layernorm.weight" in weights,
        norm_before_residual=norm_before_residual,
        fuse_bias="fc.bias" in weights,
        attention_bias="layer.self_attn.q_proj.bias" in weights,
        own_embedding=own_embedding,
        own_out=own_out,
    )


def usual_layers(num_layers: int) -> list[int]:
    """Before which of its layers a target is looked at where nothing else is said."""
    return [min(_EARLY, num_layers), num_layers // 2, max(0, num_layers - _LATE)]


def _state(files: HeadFiles, weights: dict[str, Tensor], shape: EagleShape) -> dict[str, Tensor]:
    """The head's weights by our names."""
    rest = dict(weights)

    def take(*names: str) -> Tensor:
        missing = [name for name in names if name not in rest]
        if missing:
            raise files.error(f"lacks {', '.join(missing)}")
        return torch.cat([rest.pop(name) for name in names])

    projections = [f"layer.self_attn.{each}_proj" for each in "qkv"]
    state = {
        "fuse.weight": take("fc.weight"),
        "qkv.weight": take(*(f"{each}.weight" for each in projections)),
        "attention_out.weight": take("layer.self_attn.o_proj.weight"),
        "mlp_norm.weight": take("layer.post_attention_layernorm.weight"),
        "gate_up.weight": take("layer.mlp.gate_proj.weight", "layer.mlp.up_proj.weight"),
        "mlp_out.weight": take("layer.mlp.down_proj.weight"),
    }
    if shape.kind == "eagle3":
        state["token_norm.weight"] = take("layer.input_layernorm.weight")
        state["input_norm.weight"] = take("layer.hidden_norm.weight")
        state["output_norm.weight"] = take("norm.weight")
    optional = {
        "fuse.bias": shape.fuse_bias and "fc.bias",
        "embedding.weight": shape.own_embedding and "embed_tokens.weight",
        "out.weight": shape.own_out and "lm_head.weight",
    }
    if shape.kind == "eagle":
        optional["token_norm.weight"] = shape.norms_token and "embed_layernorm.weight"
        optional["input_norm.weight"] = shape.norms_input and "layer.input_layernorm.weight"
        optional["output_norm.weight"] = shape.norms_output and "lm_head_layernorm.weight"
    state |= {ours: take(theirs) for ours, theirs in optional.items() if theirs}
    if shape.attention_bias:
        state["qkv.bias"] = take(*(f"{each}.bias" for each in projections))
    # Tables of rotations, which old files hold, follow from the config.
    unknown = [name for name in rest if not name.endswith("rotary_emb.inv_freq")]
    if unknown:
        raise files.error(f"has weights of no EAGLE: {', '.join(unknown[:4])}")
    return state


def _token_ids(files: HeadFiles, offsets: Tensor, shape: EagleShape, model: CausalLM) -> Tensor:
    """Which token each of the head's logits is: d2t holds how far that is from its own place."""
    if offsets.shape != (shape.draft_vocab_size,):
        raise files.error(f"has a d2t of shape {[*offsets.shape]}, and logits of {shape.draft_vocab_size} tokens")
    token_ids = torch.arange(len(offsets)) + offsets.long()
    if (
        int(token_ids.min()) < 0
        or int(token_ids.max()) >= model.vocab_size
        or len(set(token_ids.tolist())) < len(token_ids)
    ):
        raise files.error(f"has a d2t that does not name different tokens of the {model.vocab_size}: it holds offsets")
    return token_ids
