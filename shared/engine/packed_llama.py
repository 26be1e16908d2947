"""The forward of Llama models on CPU in few operations.

A decode step on a CPU reads every weight once, and a third of its time goes to hundreds of small operations
in between. This forward computes what transformers' does with a third of them: packed query/key/value and
gate/up products, rotary embedding of queries and keys at once, one call a normalisation. Every model is
still admitted by the self-test, against its own forward.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaForCausalLM, PreTrainedModel

from shared.engine.attention.batch import AttentionBatch
from shared.engine.attention.paged import attend
from shared.engine.linear import PackedMatrix, can_pack

# With more rows than this, the norm's own elementwise operations, which run on all cores, are faster.
_FEW_ROWS = 64


class _Layer(NamedTuple):
    attention_norm: Any
    qkv: PackedMatrix
    out: PackedMatrix
    mlp_norm: Any
    gate_up: PackedMatrix
    activation: Any
    down: PackedMatrix


class PackedLlama:
    """A `LlamaForCausalLM` whose linear layers moved into packed matrices; it cannot run by itself any more."""

    def __init__(self, model: PreTrainedModel) -> None:
        assert isinstance(model, LlamaForCausalLM)
        config, decoder = model.config, model.model
        self._embed = decoder.embed_tokens
        self._rotary = decoder.rotary_emb
        self._norm = decoder.norm
        self._layers = [
            _Layer(
                layer.input_layernorm,
                _pack(layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj),
                _pack(layer.self_attn.o_proj),
                layer.post_attention_layernorm,
                _pack(layer.mlp.gate_proj, layer.mlp.up_proj),
                layer.mlp.act_fn,
                _pack(layer.mlp.down_proj),
            )
            for layer in decoder.layers
        ]
        self._head = _pack(model.lm_head)
        attention = decoder.layers[0].self_attn
        self._scale: float = attention.scaling
        self._head_dim: int = attention.head_dim
        self._num_heads: int = config.num_attention_heads
        self._num_kv_heads: int = attention.k_proj.out_features // attention.head_dim

    @staticmethod
    def fits(model: PreTrainedModel) -> bool:
        """Whether the model is exactly a Llama (not a subclass, which may compute something else), worth packing."""
        return type(model) is LlamaForCausalLM and can_pack(model.lm_head.weight)

    def embed(self, token_ids: Tensor) -> Tensor:
        """`[T]` to `[T, hidden]`, as the first layer gets them."""
        embedded: Tensor = self._embed(token_ids)
        return embedded

    def project(self, hidden: Tensor) -> Tensor:
        """What the head makes of `[R, hidden]`, normalised by now: `[R, vocab_size]`."""
        return self._head.product(hidden)

    def first_layers(self, num_layers: int) -> PackedLlama:
        """The same weights without the layers behind the first so many."""
        part = copy.copy(self)
        part._layers = self._layers[:num_layers]
        return part

    def forward(
        self,
        token_ids: Tensor,
        position_ids: Tensor,
        batch: AttentionBatch,
        rows: Tensor,
        captured_layers: Sequence[int] = (),
    ) -> tuple[Tensor, Tensor | None]:
        """As `CausalLM.forward`: packed ids and positions `[T]` to logits `[R, vocab_size]` at `rows` `[R]`; and what
        is captured, `[T, len(captured_layers), hidden]`."""
        num_tokens, num_rotated = len(token_ids), self._num_heads + self._num_kv_heads
        x = self._embed(token_ids)
        cos, sin = (part.transpose(0, 1) for part in self._rotary(x, position_ids.unsqueeze(0)))
        # rotate_half(x) * sin, as one half-turn of x times sin with its first half negated
        half = self._head_dim // 2
        sin = torch.cat([-sin[..., :half], sin[..., half:]], dim=-1)
        captured: dict[int, Tensor] = {}
        for i, layer in enumerate(self._layers):
            if i in captured_layers:
                captured[i] = x
            heads = layer.qkv.product(_normalise(layer.attention_norm, x)).view(num_tokens, -1, self._head_dim)
            rotated = heads[:, :num_rotated]
            rotated = torch.addcmul(rotated * cos, rotated.roll(half, -1), sin)
            query, key = rotated[:, : self._num_heads], rotated[:, self._num_heads :]
            attended = attend(i, query, key, heads[:, num_rotated:], batch, self._scale)
            x = x + layer.out.product(attended.reshape(num_tokens, -1))
            gate, up = layer.gate_up.product(_normalise(layer.mlp_norm, x)).chunk(2, dim=-1)
            x = x + layer.down.product(layer.activation(gate) * up)
        if not captured_layers:
            return self._head.product(_normalise(self._norm, x[rows])), None
        captured[len(self._layers)] = normal = _normalise(self._norm, x)
        return self._head.product(normal[rows]), torch.stack([captured[i] for i in captured_layers], dim=1)


def _normalise(norm: Any, x: Tensor) -> Tensor:
    """`[T, hidden]` through a Llama RMSNorm."""
    if len(x) > _FEW_ROWS:
        out: Tensor = norm(x)
        return out
    return functional.rms_norm(x, norm.weight.shape, norm.weight, norm.variance_epsilon)


def _pack(*linears: nn.Linear) -> PackedMatrix:
    """Packs layers with the same input, and frees their plain weights (embeddings tied to one keep theirs)."""
    matrix = PackedMatrix(list(linears))
    for linear in linears:
        linear.weight = nn.Parameter(linear.weight.new_empty(0), requires_grad=False)
    return matrix
