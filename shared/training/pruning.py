"""A small model cut out of a large one: the layers, channels, heads and neurons that matter most.

As Minitron does it (Muralidharan et al. 2024).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM

from shared.settings import StartupError
from shared.training.teacher import Teacher

# Whose weights are laid out as is assumed here.
_FAMILIES = (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)


@dataclass(frozen=True, slots=True)
class Importance:
    """What of a model matters, by what it does to text. `layers`: how far each turns its input, 1 - cosine. `channels`
    `[hidden]`: mean size behind the layers' norms. `neurons` `[layers, mlp]` and `groups` `[layers, kv_heads]`: of what
    the MLP's and the attention's last products are given."""

    layers: Tensor
    channels: Tensor
    neurons: Tensor
    groups: Tensor


@torch.no_grad()
def measure_importance(teacher: Teacher, batches: Iterable[Tensor]) -> Importance:
    """Runs the batches `[B, T]` through the target. Raises StartupError if it is of no class that is known."""
    _check_family(teacher)
    model, layers = teacher.model, teacher.layers
    kv_heads = teacher.config.num_key_value_heads
    turned: list[list[Tensor]] = [[] for _ in layers]
    channels: list[Tensor] = []
    neurons: list[list[Tensor]] = [[] for _ in layers]
    groups: list[list[Tensor]] = [[] for _ in layers]
    hooks = []

    def watch(index: int, layer: Any) -> None:
        def on_layer(_: object, args: Any, kwargs: Any, output: Any) -> None:
            before = args[0] if args else kwargs["hidden_states"]
            after = output[0] if isinstance(output, tuple) else output
            turned[index].append(1 - torch.cosine_similarity(before, after, dim=-1).mean())

        hooks.append(layer.register_forward_hook(on_layer, with_kwargs=True))
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            hooks.append(norm.register_forward_hook(lambda _, __, out: channels.append(out.abs().mean((0, 1)))))
        hooks.append(layer.mlp.down_proj.register_forward_pre_hook(_seeing(neurons[index], lambda x: x.abs())))
        hooks.append(
            layer.self_attn.o_proj.register_forward_pre_hook(
                _seeing(groups[index], lambda x: x.view(*x.shape[:-1], kv_heads, -1).norm(dim=-1))
            )
        )

    for index, layer in enumerate(layers):
        watch(index, layer)
    try:
        for batch in batches:
            model(input_ids=batch.to(model.device), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return Importance(
        torch.stack([torch.stack(each).mean() for each in turned]),
        torch.stack(channels).mean(0),
        torch.stack([torch.stack(each).mean(0) for each in neurons]),
        torch.stack([torch.stack(each).mean(0) for each in groups]),
    )


def prune(teacher: Teacher, importance: Importance, num_layers: int, width: float) -> Any:
    """The target with so many of its layers, and the share `width` of channels, heads and neurons: in float32, on the
    CPU, as a model of the same class. Raises StartupError if it is of no class that is known, or nothing were left."""
    source = teacher.model
    _check_family(teacher)
    if not 1 <= num_layers <= len(teacher.layers):
        raise StartupError(f"layers is {num_layers}: it must be from 1 to the {len(teacher.layers)} of {teacher.name}")
    config = copy.deepcopy(source.config)
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    fold = config.num_attention_heads // config.num_key_value_heads
    num_groups = max(1, round(config.num_key_value_heads * width))
    # transformers wants whole numbers of channels for each head, whatever a head's size is.
    unit = math.lcm(8, num_groups * fold)
    if unit > config.hidden_size:
        raise StartupError(
            f"width is {width:g}: {num_groups * fold} heads do not go into {config.hidden_size} channels"
        )
    num_channels = min(max(unit, unit * round(config.hidden_size * width / unit)), config.hidden_size // unit * unit)
    channels = _largest(importance.channels, num_channels)
    num_neurons = _rounded(config.intermediate_size * width, config.intermediate_size)
    # What comes in, and the deepest states, are nobody else's to make.
    kept = _largest(importance.layers, num_layers).tolist()
    config.update(
        {
            "num_hidden_layers": num_layers,
            "hidden_size": len(channels),
            "intermediate_size": num_neurons,
            "num_attention_heads": num_groups * fold,
            "num_key_value_heads": num_groups,
            "head_dim": dim,
        }
    )
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = [config.layer_types[i] for i in kept]
    pruned: Any = type(source)(config).float()
    with torch.no_grad():
        pruned.model.embed_tokens.weight.copy_(source.model.embed_tokens.weight[:, channels])
        pruned.model.norm.weight.copy_(source.model.norm.weight[channels])
        if not config.tie_word_embeddings:
            pruned.lm_head.weight.copy_(source.lm_head.weight[:, channels])
        for layer, index in zip(pruned.model.layers, kept, strict=True):
            groups = _largest(importance.groups[index], num_groups)
            keys = (groups.unsqueeze(1) * dim + torch.arange(dim)).flatten()
            queries = (groups.unsqueeze(1) * (fold * dim) + torch.arange(fold * dim)).flatten()
            neurons = _largest(importance.neurons[index], num_neurons)
            _copy_layer(layer, teacher.layers[index], channels, queries, keys, neurons)
    return pruned


def _check_family(teacher: Teacher) -> None:
    if type(teacher.model) not in _FAMILIES:
        known = ", ".join(each.__name__ for each in _FAMILIES)
        raise StartupError(f"model {teacher.name} is a {type(teacher.model).__name__}: a draft is cut out of {known}")


def _copy_layer(to: Any, source: Any, channels: Tensor, queries: Tensor, keys: Tensor, neurons: Tensor) -> None:
    attention, mlp = source.self_attn, source.mlp
    for name, rows in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
        ours, theirs = getattr(to.self_attn, name), getattr(attention, name)
        ours.weight.copy_(theirs.weight[rows][:, channels])
        if theirs.bias is not None:
            ours.bias.copy_(theirs.bias[rows])
    for name in ("q_norm", "k_norm"):
        if hasattr(attention, name):
            getattr(to.self_attn, name).weight.copy_(getattr(attention, name).weight)
    to.self_attn.o_proj.weight.copy_(attention.o_proj.weight[channels][:, queries])
    to.mlp.gate_proj.weight.copy_(mlp.gate_proj.weight[neurons][:, channels])
    to.mlp.up_proj.weight.copy_(mlp.up_proj.weight[neurons][:, channels])
    to.mlp.down_proj.weight.copy_(mlp.down_proj.weight[channels][:, neurons])
    to.input_layernorm.weight.copy_(source.input_layernorm.weight[channels])
    to.post_attention_layernorm.weight.copy_(source.post_attention_layernorm.weight[channels])


def _seeing(seen: list[Tensor], size: Callable[[Tensor], Tensor]) -> Callable[[object, tuple[Tensor, ...]], None]:
    """Notes the mean size of what a layer is given."""

    def see(_: object, args: tuple[Tensor, ...]) -> None:
        seen.append(size(args[0]).mean((0, 1)))

    return see


def _largest(values: Tensor, count: int) -> Tensor:
    """Where the largest are, in order of place."""
    return values.cpu().topk(count).indices.sort().values


def _rounded(size: float, most: int) -> int:
    """A multiple of 8, for kernels' sake."""
    return min(most, max(8, 8 * round(size / 8)))
