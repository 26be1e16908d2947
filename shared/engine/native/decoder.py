"""Whole decoders in one call of the kernels: a description of the model, in place of a class for each family."""

from __future__ import annotations

import copy
import ctypes
from array import array
from collections.abc import Mapping, Sequence
from ctypes import addressof, byref, c_int32
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    LlamaForCausalLM,
    MistralForCausalLM,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
)

from shared.engine.attention.layer import LayerAttention
from shared.engine.kv_pool import KVShape
from shared.engine.native.library import Attention, Captures, Decoder, Layer, Library
from shared.engine.native.matrix import PANEL, NativeMatrix, weight_of
from shared.engine.native.step import NativeStep
from shared.engine.quantised_weight import QuantisedWeight

# Exactly these, not their subclasses, which may compute something else.
_FAMILIES = (
    LlamaForCausalLM,
    MistralForCausalLM,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Phi3ForCausalLM,
)
_GEMMAS = (Gemma2ForCausalLM, Gemma3ForCausalLM)
_ACTIVATIONS = {"silu": 0, "gelu_pytorch_tanh": 1}
# Whose frequencies do not change with the length of the sequence.
_ROPES = {"default", "linear", "llama3", "yarn"}
# Positions whose rotations are kept at first; twice as many whenever they do not suffice.
_FIRST_POSITIONS = 2048


class NativeDecoder:
    """A model whose weights moved into the kernels' layout; it cannot run by itself any more."""

    def __init__(
        self,
        library: Library,
        model: PreTrainedModel,
        shape: KVShape,
        attention: Sequence[LayerAttention],
        quantised: Mapping[nn.Linear, int],
    ) -> None:
        """`attention` of every layer, in order; `quantised`: the bits of all linear layers but the head, or none.
        Only where `fits`."""
        decoder, config = model.model, model.config
        self._library = library
        self._quantised = quantised
        self._kept: list[object] = []
        self._norm_offset = 1.0 if type(model) in _GEMMAS else 0.0
        # Gemma 3 has frequencies of their own for layers with a window.
        layer_types: list[str | None] = (
            list(config.layer_types) if isinstance(model, Gemma3ForCausalLM) else [None] * len(decoder.layers)
        )
        self._vocab_size = model.lm_head.out_features
        embedding = decoder.embed_tokens
        tied = embedding.weight.data_ptr() == model.lm_head.weight.data_ptr()
        scale = float(embedding.embed_scale.to(embedding.weight.dtype)) if type(model) in _GEMMAS else 1.0
        self._head = head = self._pack(model.lm_head)
        self._embedding: Tensor | None = None
        if tied:
            _free(embedding)
        else:
            self._embedding = embedding.weight.detach()
        layers = (Layer * len(decoder.layers))(
            *(self._describe(layer, how) for layer, how in zip(decoder.layers, attention, strict=True))
        )
        del self._quantised
        self._rotations = _Rotations(decoder.rotary_emb, layers, layer_types)
        self._struct = Decoder(
            embedding=None if tied else embedding.weight.data_ptr(),
            head=head.struct,
            final_norm=self._norm(decoder.norm),
            layers=layers,
            num_layers=len(decoder.layers),
            hidden=config.hidden_size,
            mlp=config.intermediate_size,
            num_heads=attention[0].num_heads,
            head_dim=shape.key_head_dim,
            rotary_dim=self._rotations.dim,
            activation=_ACTIVATIONS[_activation(config)],
            norm_eps=config.rms_norm_eps,
            embedding_scale=scale,
            logit_softcap=getattr(config, "final_logit_softcapping", None) or 0.0,
        )

    @staticmethod
    def fits(model: PreTrainedModel, shape: KVShape, attention: Sequence[LayerAttention]) -> bool:
        """Whether the model is of a family that can be described, in bf16 on the CPU, and nothing in it is unusual."""
        if type(model) not in _FAMILIES or model.dtype != torch.bfloat16 or model.device.type != "cpu":
            return False
        ropes = model.model.rotary_emb.rope_type
        return (
            _activation(model.config) in _ACTIVATIONS
            and set(ropes.values() if isinstance(ropes, dict) else [ropes]) <= _ROPES
            and len({how.num_heads for how in attention}) == 1
            and len(attention) == len(model.model.layers)
            and shape.key_head_dim == shape.value_head_dim
            and shape.key_head_dim % 2 == 0
            and model.config.hidden_size % 2 == 0
            and model.lm_head.bias is None
        )

    def embed(self, token_ids: Tensor) -> Tensor:
        """`[T]` to `[T, hidden]`, as the first layer gets them."""
        rows = self._head.rows(token_ids) if self._embedding is None else self._embedding[token_ids]
        return rows * float(self._struct.embedding_scale)

    def project(self, hidden: Tensor) -> Tensor:
        """What the head makes of `[R, hidden]`, normalised by now: `[R, vocab_size]`, in bf16 and uncapped."""
        return self._head.product(hidden)

    def first_layers(self, num_layers: int) -> NativeDecoder:
        """The same weights without the layers behind the first so many."""
        part = copy.copy(self)
        part._struct = Decoder.from_buffer_copy(self._struct)
        part._struct.num_layers = num_layers
        return part

    def forward(
        self, token_ids: array[int] | Tensor, step: NativeStep, rows: array[int], captured_layers: Sequence[int] = ()
    ) -> tuple[Tensor, Tensor | None]:
        """As `CausalLM.forward`: packed ids `[T]` to logits `[R, vocab_size]` at `rows` `[R]`, in float32; and what is
        captured, `[T, len(captured_layers), hidden]` in float32, None where nothing is.

        Behind a step nothing of what Python does is left in any cache: that each call is a cheap one is much of what
        a small model's step takes beside the kernels.
        """
        self._rotations.reach(step.num_positions)
        logits = torch.empty((len(rows), self._vocab_size))
        captured, captures = None, Captures()
        if captured_layers:
            captured = torch.empty((len(token_ids), len(captured_layers), self._struct.hidden))
            layers = (c_int32 * len(captured_layers))(*captured_layers)
            captures = Captures(addressof(layers), len(layers), captured.data_ptr())
        self._library.forward(
            byref(self._struct),
            byref(step.pool),
            byref(step.batch),
            token_ids.data_ptr() if isinstance(token_ids, Tensor) else token_ids.buffer_info()[0],
            rows.buffer_info()[0],
            len(rows),
            logits.data_ptr(),
            byref(captures),
            torch.get_num_threads(),
        )
        return logits, captured

    def _describe(self, layer: Any, how: LayerAttention) -> Layer:
        attention, mlp = layer.self_attn, layer.mlp
        if hasattr(attention, "qkv_proj"):
            qkv = self._pack(attention.qkv_proj)
        else:
            qkv = self._pack(attention.q_proj, attention.k_proj, attention.v_proj)
        gemma = bool(self._norm_offset)
        # Gemmas normalise what attention and MLP give, too, and call the norm before the MLP by another name.
        return Layer(
            attention_norm=self._norm(layer.input_layernorm),
            query_norm=self._norm(getattr(attention, "q_norm", None)),
            key_norm=self._norm(getattr(attention, "k_norm", None)),
            attention_out_norm=self._norm(layer.post_attention_layernorm if gemma else None),
            mlp_norm=self._norm(layer.pre_feedforward_layernorm if gemma else layer.post_attention_layernorm),
            mlp_out_norm=self._norm(layer.post_feedforward_layernorm if gemma else None),
            qkv=qkv.struct,
            attention_out=self._pack(attention.o_proj).struct,
            gate_up=self._pack_gate_up(mlp).struct,
            mlp_out=self._pack(mlp.down_proj).struct,
            attention=Attention(how.num_heads, how.sliding_window or 0, how.scale, how.softcap or 0.0, None),
        )

    def _norm(self, norm: Any) -> int | None:
        """Address of a norm's weights in float32; None where there is no norm."""
        if norm is None:
            return None
        weight = norm.weight.detach().float() + self._norm_offset
        self._kept.append(weight)
        return int(weight.data_ptr())

    def _pack(self, *linears: nn.Linear) -> NativeMatrix:
        matrix = NativeMatrix.of(self._library, list(linears), self._quantised)
        self._kept.append(matrix)
        for linear in linears:
            _free(linear)
        return matrix

    def _pack_gate_up(self, mlp: Any) -> NativeMatrix:
        """Gate and up in turns of half a panel, so that one panel has what belongs together."""
        if hasattr(mlp, "gate_up_proj"):
            linears = [mlp.gate_up_proj]
            both = mlp.gate_up_proj.bias
            biases = [] if both is None else list(both.detach().chunk(2))
        else:
            linears = [mlp.gate_proj, mlp.up_proj]
            biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
        weight = self._weights_in_turns(linears)
        bias = _in_turns([part.unsqueeze(-1) for part in biases]).view(-1) if biases else None
        matrix = NativeMatrix(self._library, [weight], [bias])
        self._kept.append(matrix)
        for linear in linears:
            _free(linear)
        return matrix

    def _weights_in_turns(self, linears: list[nn.Linear]) -> Tensor | QuantisedWeight:
        weights = [weight_of(linear, self._quantised) for linear in linears]
        parts = [weight for weight in weights if isinstance(weight, QuantisedWeight)]
        if not parts:
            return _in_turns(_halves([weight for weight in weights if isinstance(weight, Tensor)]))
        values, scales = (_in_turns(_halves(list(each))) for each in zip(*(part[:2] for part in parts), strict=True))
        return parts[0]._replace(values=values, scales=scales)


class _Rotations:
    """Cosines and sines that positions turn queries and keys by, as far as they are needed; the layers point to them.

    `layer_types`: of each layer, by which its frequencies are chosen; None where all have the same.
    """

    def __init__(self, rotary: Any, layers: ctypes.Array[Layer], layer_types: Sequence[str | None]) -> None:
        self._rotary, self._layers, self._layer_types = rotary, layers, layer_types
        self._tables: dict[str | None, tuple[Tensor, Tensor]] = {}
        self._num_positions = 0
        self.reach(1)

    @property
    def dim(self) -> int:
        """Of a head, how much is turned."""
        return 2 * self._tables[self._layer_types[0]][0].shape[1]

    def reach(self, num_positions: int) -> None:
        """Has the rotations of positions 0 to `num_positions` - 1 at hand."""
        if num_positions <= self._num_positions:
            return
        self._num_positions = max(_FIRST_POSITIONS, 2 * num_positions)
        positions = torch.arange(self._num_positions).unsqueeze(0)
        for layer_type in set(self._layer_types):
            # In float32, whatever the model's type; it gives each angle twice.
            like = torch.empty(0, dtype=torch.float32)
            angles = self._rotary(like, positions, *([] if layer_type is None else [layer_type]))
            cosines, sines = (part[0, :, : part.shape[-1] // 2].float().contiguous() for part in angles)
            self._tables[layer_type] = (cosines, sines)
        for layer, layer_type in zip(self._layers, self._layer_types, strict=True):
            cosines, sines = self._tables[layer_type]
            layer.cosines, layer.sines = cosines.data_ptr(), sines.data_ptr()


def _activation(config: Any) -> str:
    return str(getattr(config, "hidden_activation", None) or config.hidden_act)


def _halves(weights: list[Tensor]) -> list[Tensor]:
    """Gate's and up's, whether they are two or one."""
    return weights if len(weights) == 2 else list(weights[0].chunk(2))


def _in_turns(parts: list[Tensor]) -> Tensor:
    """`[n, m]` twice to `[2 * n', m]`: half a panel of the first's rows, half a panel of the second's, and so on; n'
    is n filled up with zeros."""
    half = PANEL // 2
    padding = -len(parts[0]) % half
    turns = [nn.functional.pad(part, (0, 0, 0, padding)).view(-1, half, part.shape[1]) for part in parts]
    return torch.stack(turns, dim=1).view(-1, parts[0].shape[1])


def _free(layer: nn.Linear | nn.Embedding) -> None:
    layer.weight = nn.Parameter(layer.weight.new_empty(0), requires_grad=False)
