"""Weights in bf16 laid out for the kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from shared.engine.native.library import Library, Matrix

# Outputs of a panel, as in linear.h.
PANEL = 32


class NativeMatrix:
    """Weights of linear layers that are given the same input, `[in_features, sum(sizes)]`. Inference only.

    A step of few rows takes as long as reading them does; a row's result does not depend, to the bit, on what rows it
    is computed with.
    """

    def __init__(self, library: Library, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> None:
        """`weights` `[size, in_features]`, contiguous, in bf16 on the CPU; `biases` `[size]` of any type."""
        self._library = library
        self.sizes = [len(weight) for weight in weights]
        outputs, inputs = sum(self.sizes), weights[0].shape[1]
        self._weight = torch.zeros(library.packed_size(inputs, outputs), dtype=torch.bfloat16)
        first = 0
        for weight in weights:
            library.pack(
                weight.data_ptr(), len(weight), inputs, first, self._weight.data_ptr(), torch.get_num_threads()
            )
            first += len(weight)
        self._bias: Tensor | None = None
        if any(bias is not None for bias in biases):
            parts = [
                torch.zeros(size) if bias is None else bias.float()
                for size, bias in zip(self.sizes, biases, strict=True)
            ]
            self._bias = torch.cat(parts)
        self.struct = Matrix(
            self._weight.data_ptr(), None if self._bias is None else self._bias.data_ptr(), inputs, outputs
        )

    @classmethod
    def of(cls, library: Library, linears: list[nn.Linear]) -> NativeMatrix:
        weights = [linear.weight.detach().contiguous() for linear in linears]
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
