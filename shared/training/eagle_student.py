"""An EAGLE-3 head as it is trained: unrolled as it will be used (Li et al. 2025, training-time test)."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from shared.self_drafting.eagle import EagleHead, EagleShape, turn
from shared.self_drafting.eagle_files import usual_layers
from shared.self_drafting.head_files import remove_weights
from shared.training.teacher import Lesson, Teacher


class EagleStudent:
    """Step 0 sees what the target saw, and each further step what the head itself made of the one before, while it
    attends to the target's states up to where it went on alone."""

    kind = "eagle3"
    first_ahead = 1

    def __init__(self, teacher: Teacher, num_steps: int) -> None:
        self._num_steps = num_steps
        self._teacher = teacher
        self._config = _layer_config(teacher.config)
        weight = teacher.head_weight
        self._layers = usual_layers(teacher.num_layers)
        shape = EagleShape(
            kind="eagle3",
            config=self._config,
            captured_layers=tuple(self._layers),
            target_hidden=teacher.config.hidden_size,
            head_dim=self._config.head_dim or 0,
            num_kv_heads=self._config.num_key_value_heads or 0,
            draft_vocab_size=len(weight),
            own_out=True,
        )
        self._head = EagleHead(shape).to(weight.device)
        assert self._head.out is not None
        self._head.out.weight.data.copy_(weight)
        if _begins_as(self._head, teacher.layers[-1]):
            assert self._head.output_norm is not None
            self._head.output_norm.weight.data.copy_(teacher.norm_weight)
        rotary: Any = LlamaRotaryEmbedding(self._config)
        self._rotary = rotary.to(weight.device)
        teacher.capture(self._layers)

    @property
    def module(self) -> EagleHead:
        return self._head

    def predictions(self, lesson: Lesson) -> list[Tensor]:
        """At slot s of a step: the token at s + 1 beside what was seen at s, to guess the token at s + 2."""
        head = self._head
        assert lesson.seen is not None
        embedded = self._teacher.embed(lesson.token_ids[:, 1:])
        num_slots = embedded.shape[1]
        seen = head.see(lesson.seen[:, :num_slots].flatten(0, 1)).view(embedded.shape)
        keys: list[Tensor] = []
        values: list[Tensor] = []
        predictions = []
        for step in range(self._num_steps):
            out = self._step(embedded, seen, keys, values)
            assert head.output_norm is not None
            assert head.out is not None
            predictions.append(head.out(head.output_norm(out[:, step:])))
            # Of slot s, what the head made of the slot before; what stands at the first slots is never looked at.
            seen = out.roll(1, dims=1)
        return predictions

    def _step(self, embedded: Tensor, seen: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        """`[B, S, hidden]`; this step's keys and values, `[B, heads, S, dim]`, join those of the steps before."""

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys.append(key)
            values.append(value)
            return _attend(query, keys, values)

        positions = torch.arange(embedded.shape[1], device=embedded.device).unsqueeze(0)
        cos, sin = self._rotary(embedded, positions)
        out: Tensor = self._head.layer(embedded, seen, lambda *qkv: attend(*_turned(qkv, cos, sin)))
        return out

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        remove_weights(folder)
        weights = {name: tensor.detach().to("cpu", torch.bfloat16) for name, tensor in published(self._head).items()}
        vocab_size = self._head.shape.draft_vocab_size
        weights["d2t"] = torch.zeros(vocab_size, dtype=torch.int64)
        weights["t2d"] = torch.ones(vocab_size, dtype=torch.bool)
        save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / "model.safetensors")
        layer = self._config.to_diff_dict() | {"num_hidden_layers": 1}
        config = {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "speculators_config": {
                "algorithm": "eagle3",
                "default_proposal_method": "greedy",
                "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": self._num_steps}],
                "verifier": {
                    "name_or_path": self._teacher.name,
                    "architectures": self._teacher.model.config.architectures,
                },
            },
            "transformer_layer_config": layer,
            "draft_vocab_size": vocab_size,
            "norm_before_residual": False,
            "eagle_aux_hidden_state_layer_ids": self._layers,
            "tie_word_embeddings": False,
        }
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _begins_as(head: EagleHead, layer: Any) -> bool:
    """Where the target's last layer is a Llama's, the head begins as that layer on the latest state that it sees, and
    learns faster for it. Whether it does."""
    attention, mlp = getattr(layer, "self_attn", None), getattr(layer, "mlp", None)
    try:
        projections = torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight])  # type: ignore[union-attr]
        gate_up = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])  # type: ignore[union-attr]
        kept = {
            head.attention_out: attention.o_proj.weight,  # type: ignore[union-attr]
            head.gate_up: gate_up,
            head.mlp_out: mlp.down_proj.weight,  # type: ignore[union-attr]
        }
    except AttributeError:
        return False
    hidden = head.shape.config.hidden_size
    with torch.no_grad():
        head.qkv.weight[:, hidden:] = projections
        for ours, theirs in kept.items():
            ours.weight.copy_(theirs)
        head.fuse.weight[:, :-hidden] *= 0.1
        head.fuse.weight[:, -hidden:] = torch.eye(hidden)
    return True


def _layer_config(config: Any) -> LlamaConfig:
    """A Llama layer of the target's own shape."""
    return LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        num_hidden_layers=1,
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
        max_position_embeddings=config.max_position_embeddings,
        rms_norm_eps=getattr(config, "rms_norm_eps", 1e-6),
    )


def _turned(qkv: tuple[Tensor, ...], cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value `[B, S, heads, dim]` to `[B, heads, S, dim]`, the first two turned by their positions."""
    query, key, value = qkv
    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
    return turn(query, cos, sin).transpose(1, 2), turn(key, cos, sin).transpose(1, 2), value.transpose(1, 2)


def _attend(query: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """Step j's queries `[B, heads, S, dim]`: slot s sees slots up to s - j of step 0, then of each step i slot
    s - j + i, up to its own. `[B, S, heads, dim]`."""
    step, num_slots = len(keys) - 1, query.shape[2]
    fold = query.shape[1] // keys[0].shape[1]
    key, value = (each[0].repeat_interleave(fold, dim=1) for each in (keys, values))
    hidden = torch.ones(num_slots, num_slots, dtype=torch.bool, device=query.device).triu(1 - step)
    scores = (query @ key.transpose(2, 3)).masked_fill(hidden, -math.inf)
    own = [
        (query * keys[i].repeat_interleave(fold, dim=1).roll(step - i, dims=2)).sum(-1, keepdim=True)
        for i in range(1, step + 1)
    ]
    weights = (torch.cat([scores, *own], dim=-1) * query.shape[-1] ** -0.5).softmax(-1)
    out = weights[..., :num_slots] @ value
    for i in range(1, step + 1):
        own_value = values[i].repeat_interleave(fold, dim=1).roll(step - i, dims=2)
        out = out + weights[..., num_slots + i - 1 : num_slots + i] * own_value
    attended: Tensor = out.transpose(1, 2)
    return attended


def published(head: EagleHead) -> dict[str, Tensor]:
    """The head's weights by the names that the speculators have."""
    shape = head.shape
    dim, kv_heads = shape.head_dim, shape.num_kv_heads
    sizes = [shape.config.num_attention_heads * dim, kv_heads * dim, kv_heads * dim]
    query, key, value = torch.split(head.qkv.weight, sizes)
    gate, up = head.gate_up.weight.chunk(2)
    assert head.token_norm is not None
    assert head.input_norm is not None
    assert head.output_norm is not None
    assert head.out is not None
    return {
        "fc.weight": head.fuse.weight,
        "layers.0.input_layernorm.weight": head.token_norm.weight,
        "layers.0.hidden_norm.weight": head.input_norm.weight,
        "layers.0.self_attn.q_proj.weight": query,
        "layers.0.self_attn.k_proj.weight": key,
        "layers.0.self_attn.v_proj.weight": value,
        "layers.0.self_attn.o_proj.weight": head.attention_out.weight,
        "layers.0.post_attention_layernorm.weight": head.mlp_norm.weight,
        "layers.0.mlp.gate_proj.weight": gate,
        "layers.0.mlp.up_proj.weight": up,
        "layers.0.mlp.down_proj.weight": head.mlp_out.weight,
        "norm.weight": head.output_norm.weight,
        "lm_head.weight": head.out.weight,
    }
