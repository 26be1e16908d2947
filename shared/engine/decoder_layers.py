"""Where a Hugging Face model has its layers."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from shared.settings import StartupError


def decoder_of(model: PreTrainedModel, name: str) -> Any:
    """The module of the model that has its `layers`, all of them, and the `norm` behind the last. Raises StartupError
    if there is none."""
    return _path_to_decoder(model, name)[-1][1]


def first_layers(model: PreTrainedModel, num_layers: int, name: str) -> PreTrainedModel:
    """The model without the layers behind the first `num_layers`, of the very same modules. Raises StartupError as
    `decoder_of` does."""
    path = _path_to_decoder(model, name)
    part: Any = _with_own_children(path[-1][1])
    part.layers = part.layers[:num_layers]
    for (child, _), (_, parent) in zip(path[:0:-1], path[-2::-1], strict=True):
        outer: Any = _with_own_children(parent)
        setattr(outer, child, part)
        part = outer
    whole: PreTrainedModel = part
    return whole


def _path_to_decoder(model: PreTrainedModel, name: str) -> list[tuple[str, nn.Module]]:
    """From the model itself (whose name is empty) by names of children to the decoder."""
    num_layers = model.config.get_text_config().num_hidden_layers
    for full_name, module in model.named_modules():
        layers = getattr(module, "layers", None)
        if isinstance(layers, nn.ModuleList) and len(layers) == num_layers and hasattr(module, "norm"):
            path: list[tuple[str, nn.Module]] = [("", model)]
            for child in full_name.split(".") if full_name else []:
                path.append((child, getattr(path[-1][1], child)))
            return path
    raise StartupError(f"model {name} has no row of layers with a norm behind it: none can draft on what it computes")


def _with_own_children(module: nn.Module) -> nn.Module:
    """A copy of which children can be replaced, and that shares them."""
    part = copy.copy(module)
    part._modules = dict(module._modules)
    return part
