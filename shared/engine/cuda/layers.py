"""Layers of Hugging Face models in few launches: their own modules and weights, computed by kernels of our own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import triton
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.mistral.modeling_mistral import MistralDecoderLayer
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from shared.engine.cuda.device import device_of
from shared.engine.cuda.elementwise import add_and_normalise, gate
from shared.engine.cuda.step import HeadNorms
from shared.engine.decoder_layers import decoder_layers

if TYPE_CHECKING:
    from shared.engine.attention.batch import AttentionBatch
    from shared.engine.attention.layer import LayerAttention
    from shared.engine.cuda.graphs import StaticBatch

# Exactly these, not their subclasses, which may compute something else.
_LAYERS = (LlamaDecoderLayer, MistralDecoderLayer, Qwen2DecoderLayer, Qwen3DecoderLayer)
_ACTIVATIONS = ("silu", "swish")
# Numbers that a program of `gate` takes.
_GATED = 1024


class NormAhead:
    """A layer's first norm, or a model's last, which the layer before applies as it adds up what is to go through."""

    def __init__(self, norm: Any) -> None:
        self._norm = norm
        self._found: tuple[Tensor, Tensor] | None = None

    def add(self, x: Tensor, added: Tensor) -> Tensor:
        """The sum of both, `[T, hidden]`, as `[1, T, hidden]`: when that comes by, it has been through the norm."""
        total, normal = add_and_norm(self._norm, x, added)
        hidden_states = total.unsqueeze(0)
        self._found = hidden_states, normal
        return hidden_states

    def found(self, hidden_states: Tensor) -> Tensor | None:
        """`[T, hidden]`, what the norm makes of `[1, T, hidden]`; None if that is another tensor than was added up."""
        found, self._found = self._found, None
        return found[1] if found is not None and found[0] is hidden_states else None

    def __call__(self, hidden_states: Tensor) -> Tensor:
        """In place of the `forward` of a model's last."""
        normal = self.found(hidden_states)
        own: Tensor = type(self._norm).forward(self._norm, hidden_states) if normal is None else normal.unsqueeze(0)
        return own


class FusedLayer:
    """Takes the place of a layer's `forward`, for steps over paged KV; any other call is the layer's own.

    Query, key and value are one product, and so are gate and up: their weights become one, of which the modules' own
    are views from then on. The norm before it may have been applied already, and the `next_norm` behind it is applied
    along with its last sum.
    """

    def __init__(self, layer: Any, how: LayerAttention, norm: NormAhead, next_norm: NormAhead) -> None:
        self._layer = layer
        self._how = how
        self._norm, self._next_norm = norm, next_norm
        attention, mlp = layer.self_attn, layer.mlp
        self._index: int = attention.layer_idx
        self._qkv = _joined([attention.q_proj, attention.k_proj, attention.v_proj])
        self._gate_up = _joined([mlp.gate_proj, mlp.up_proj])
        self._norms: HeadNorms | None = None
        if isinstance(layer, Qwen3DecoderLayer):
            self._norms = HeadNorms(
                attention.q_norm.weight, attention.k_norm.weight, float(attention.q_norm.variance_epsilon)
            )

    def __call__(
        self,
        hidden_states: Tensor,
        *args: Any,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_batch: AttentionBatch | StaticBatch | None = None,
        **kwargs: Any,
    ) -> Tensor:
        layer = self._layer
        step = None if attention_batch is None else attention_batch.cuda
        if step is None or position_embeddings is None or position_embeddings[0].shape[-1] != layer.self_attn.head_dim:
            if attention_batch is not None:
                kwargs["attention_batch"] = attention_batch
            out: Tensor = type(layer).forward(
                layer, hidden_states, *args, position_embeddings=position_embeddings, **kwargs
            )
            return out
        x = hidden_states[0]
        with device_of(x):
            normal = self._norm.found(hidden_states)
            if normal is None:
                normal = normalise(layer.input_layernorm, x)
            product = functional.linear(normal, *self._qkv)
            cosines, sines = (part[0].contiguous() for part in position_embeddings)
            attended = step.attend_product(self._index, product, cosines, sines, self._norms, self._how)
            added = layer.self_attn.o_proj(attended.flatten(1))
            x, normal = add_and_norm(layer.post_attention_layernorm, x, added)
            return self._next_norm.add(x, layer.mlp.down_proj(gated(functional.linear(normal, *self._gate_up))))


def fuse_layers(model: PreTrainedModel, attention: Sequence[LayerAttention]) -> int:
    """How many of its layers are computed so from now on, all or none; `attention` of each, in order."""
    if getattr(model.config.get_text_config(), "hidden_act", None) not in _ACTIVATIONS:
        return 0
    layers: list[Any] = [module for module in model.modules() if type(module) in _LAYERS]
    if not layers or not all(map(_is_plain, layers)):
        return 0
    whole: Any = decoder_layers(model, type(model).__name__)
    last_norm = whole.norm
    if list(whole.layers) != layers or type(last_norm) is not type(layers[0].input_layernorm):
        return 0
    norms = [*(NormAhead(layer.input_layernorm) for layer in layers), NormAhead(last_norm)]
    # In place of methods: not children, which weights would be looked for in.
    for layer, norm, next_norm in zip(layers, norms, norms[1:], strict=False):
        layer.forward = FusedLayer(layer, attention[layer.self_attn.layer_idx], norm, next_norm)
        if layer.mlp.up_proj.weight.is_cuda:
            torch.cuda.empty_cache()  # what its weights were in
    last_norm.forward = norms[-1]
    return len(layers)


def _is_plain(layer: Any) -> bool:
    """Whether its products are of weights that are numbers of one type: quantised ones are not to be touched."""
    attention, mlp = layer.self_attn, layer.mlp
    linears = [attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj]
    return {type(linear) for linear in linears} == {nn.Linear} and len({linear.weight.dtype for linear in linears}) == 1


def unfuse_layers(model: PreTrainedModel) -> None:
    """Has its layers compute as ever."""
    for module in model.modules():
        if isinstance(module.__dict__.get("forward"), FusedLayer | NormAhead):
            del module.__dict__["forward"]


def normalise(norm: Any, x: Tensor) -> Tensor:
    """`[T, hidden]` through an RMSNorm of these models."""
    normal = torch.empty_like(x)
    hidden = x.shape[1]
    add_and_normalise[(len(x),)](
        normal, normal, x, x, norm.weight, norm.variance_epsilon,
        HIDDEN=hidden, SIZE=triton.next_power_of_2(hidden), HAS_ADDED=False,
    )  # fmt: skip
    return normal


def add_and_norm(norm: Any, x: Tensor, added: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of both, `[T, hidden]`, and it through the norm."""
    total, normal = torch.empty_like(x), torch.empty_like(x)
    hidden = x.shape[1]
    add_and_normalise[(len(x),)](
        total, normal, x, added, norm.weight, norm.variance_epsilon,
        HIDDEN=hidden, SIZE=triton.next_power_of_2(hidden), HAS_ADDED=True,
    )  # fmt: skip
    return total, normal


def gated(gate_up: Tensor) -> Tensor:
    """SiLU of the first half of `[T, 2 * mlp]` times the second."""
    num_tokens, mlp = len(gate_up), gate_up.shape[1] // 2
    out = gate_up.new_empty((num_tokens, mlp))
    gate[(num_tokens, triton.cdiv(mlp, _GATED))](out, gate_up, gate_up.stride(0), MLP=mlp, SIZE=_GATED)
    return out


def _joined(linears: list[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of the layers' outputs one behind the other; their own weights are views of it from now on."""
    weight = torch.cat([linear.weight.detach() for linear in linears])
    has_bias = any(linear.bias is not None for linear in linears)
    bias = None
    if has_bias:
        bias = torch.cat(
            [
                linear.weight.new_zeros(linear.out_features) if linear.bias is None else linear.bias.detach()
                for linear in linears
            ]
        )
    parts = torch.split(weight, [linear.out_features for linear in linears])
    for linear, part in zip(linears, parts, strict=True):
        linear.weight = nn.Parameter(part, requires_grad=False)
    return weight, bias
