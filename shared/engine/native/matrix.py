"""Weights in bf16, or quantised, laid out for the kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from shared.engine.native.library import Library, Matrix
from shared.engine.quantised_weight import QuantisedWeight

# Outputs of a panel, as in panel.h.
PANEL = 32


class NativeMatrix:
    """Weights of linear layers that are given the same input, `[in_features, sum(sizes)]`. Inference only.

    A step of few rows takes as long as reading them does; a row's result does not depend, to the bit, on what rows it
    is computed with.
    """

    def __init__(
        self, library: Library, weights: Sequence[Tensor | QuantisedWeight], biases: Sequence[Tensor | None]
    ) -> None:
        """`weights` `[size, in_features]`, contiguous, in bf16 on the CPU, or all quantised alike; `biases` `[size]` of
        any type."""
        self._library = library
        quantised = [weight for weight in weights if isinstance(weight, QuantisedWeight)]
        plain = [weight for weight in weights if not isinstance(weight, QuantisedWeight)]
        assert not plain or not quantised
        values = [weight.values for weight in quantised] or plain
        self.sizes = [len(each) for each in values]
        outputs, inputs, num_threads = sum(self.sizes), values[0].shape[1], torch.get_num_threads()
        bits, group = (quantised[0].bits, quantised[0].group) if quantised else (16, inputs)
        self._weight = torch.zeros(library.packed_size(inputs, outputs, bits), dtype=torch.uint8)
        packed, first = self._weight.data_ptr(), 0
        for each in values:
            where = each.data_ptr(), len(each), inputs, first
            if quantised:
                library.pack_quantised(*where, bits, packed, num_threads)
            else:
                library.pack(*where, packed, num_threads)
            first += len(each)
        self._scales = _by_panels(torch.cat([weight.scales for weight in quantised])) if quantised else None
        self._bias: Tensor | None = None
        if any(bias is not None for bias in biases):
            parts = [
                torch.zeros(size) if bias is None else bias.float()
                for size, bias in zip(self.sizes, biases, strict=True)
            ]
            self._bias = torch.cat(parts)
        bias, scales = (None if part is None else part.data_ptr() for part in (self._bias, self._scales))
        self.struct = Matrix(packed, bias, scales, inputs, outputs, group, bits)

    @classmethod
    def of(cls, library: Library, linears: list[nn.Linear], quantised: Mapping[nn.Linear, int]) -> NativeMatrix:
        """`quantised`: bits of those that are, all or none of these."""
        weights = [weight_of(linear, quantised) for linear in linears]
        biases = [None if linear.bias is None else linear.bias.detach() for linear in linears]
        return cls(library, weights, biases)

    def product(self, x: Tensor) -> Tensor:
        """`[..., in_features]` to `[..., sum(sizes)]` in bf16, the layers' outputs one after another."""
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        out = rows.new_empty((len(rows), self.struct.outputs))
        if len(rows):
            self._library.linear(
                ctypes.byref(self.struct), rows.data_ptr(), len(rows), out.data_ptr(), torch.get_num_threads()
            )
        return out.view(*x.shape[:-1], self.struct.outputs)

    def rows(self, outputs: Tensor) -> Tensor:
        """Weights of these outputs, `[n, in_features]`; of a matrix in bf16."""
        assert self.struct.bits == 16
        panels = self._weight.view(torch.bfloat16).view(-1, (self.struct.inputs + 1) // 2, PANEL, 2)
        return panels[outputs // PANEL, :, outputs % PANEL].flatten(1)[:, : self.struct.inputs]


def weight_of(linear: nn.Linear, quantised: Mapping[nn.Linear, int]) -> Tensor | QuantisedWeight:
    """Of a layer whose bits `quantised` tells, what they hold."""
    weight = linear.weight.detach()
    return QuantisedWeight.of(weight, quantised[linear]) if linear in quantised else weight.contiguous()


def _by_panels(scales: Tensor) -> Tensor:
    """`[outputs, groups]` to `[groups, outputs']`, filled up with zeros to whole panels."""
    return nn.functional.pad(scales.T, (0, -len(scales) % PANEL)).contiguous()
