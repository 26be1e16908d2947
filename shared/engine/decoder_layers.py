"""Where a Hugging Face model has its layers."""

from __future__ import annotations

import copy
from typing import NamedTuple

from torch import nn
from transformers import PreTrainedModel

from shared.settings import StartupError

# What they, and the norm behind the last of them, are called.
_LAYERS = ("layers", "h")
_NORMS = ("norm", "ln_f", "final_layernorm")


class DecoderLayers(NamedTuple):
    """A model's `layers`, all of them, and the `norm` behind the last; `path`: by which names of children one comes
    from the model to the layers."""

    layers: nn.ModuleList
    norm: nn.Module
    path: tuple[str, ...]


def decoder_layers(model: PreTrainedModel, name: str) -> DecoderLayers:
    """Raises StartupError if there is no row of layers with a norm behind it."""
    num_layers = model.config.get_text_config().num_hidden_layers
    for full_name, module in model.named_modules():
        for child in _LAYERS:
            layers = getattr(module, child, None)
            norm = next((found for each in _NORMS if isinstance(found := getattr(module, each, None), nn.Module)), None)
            if isinstance(layers, nn.ModuleList) and len(layers) == num_layers and norm is not None:
                return DecoderLayers(layers, norm, (*filter(None, full_name.split(".")), child))
    raise StartupError(
        f"model {name} has no row of layers with a norm behind it: nothing can be drafted from what it computes"
    )


def first_layers(model: PreTrainedModel, num_layers: int, name: str) -> PreTrainedModel:
    """The model without the layers behind the first `num_layers`, of the very same modules. Raises StartupError as
    `decoder_layers` does."""
    found = decoder_layers(model, name)
    whole = module = _with_own_children(model)
    for child in found.path[:-1]:
        part = _with_own_children(getattr(module, child))
        setattr(module, child, part)
        module = part
    setattr(module, found.path[-1], found.layers[:num_layers])
    assert isinstance(whole, PreTrainedModel)
    return whole


def _with_own_children(module: nn.Module) -> nn.Module:
    """A copy of which children can be replaced, and that shares them."""
    part = copy.copy(module)
    part._modules = dict(module._modules)
    return part
