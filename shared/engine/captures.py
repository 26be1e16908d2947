"""What a model's layers are given, as it computes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shared.engine.decoder_layers import DecoderLayers


class Captures:
    """Keeps what a model of transformers' gives its layers, of these numbers, or as the last one's successor its
    head."""

    def __init__(self, model: DecoderLayers, layers: Sequence[int]) -> None:
        self._layers = list(layers)
        self._seen: dict[int, Tensor] = {}
        for layer in set(layers):
            if layer < len(model.layers):
                model.layers[layer].register_forward_pre_hook(partial(self._see, layer), with_kwargs=True)
            else:
                model.norm.register_forward_hook(partial(self._see_output, layer))

    def take(self) -> Tensor:
        """Of the forward that just ended, of one row, `[T, len(layers), hidden]`."""
        return self.take_batch()[0]

    def take_batch(self) -> Tensor:
        """Of all its rows, `[B, T, len(layers), hidden]`."""
        seen, self._seen = self._seen, {}
        return torch.stack([seen[layer] for layer in self._layers], dim=2)

    def _see(self, layer: int, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._seen[layer] = args[0] if args else kwargs["hidden_states"]

    def _see_output(self, layer: int, _: nn.Module, __: tuple[Any, ...], output: Tensor) -> None:
        self._seen[layer] = output
