"""Linear layers with weights laid out beforehand: for kernels of our own, or for oneDNN's where there are none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from shared.engine.native.library import Library
from shared.engine.native.matrix import NativeMatrix

# Rows the layout is chosen for. oneDNN's choice hardly depends on it; small steps are the common ones.
_TYPICAL_ROWS = 32


class LinearMatrix(Protocol):
    """Weights of linear layers that are given the same input, as one; `sizes` are the layers' outputs."""

    sizes: list[int]

    def product(self, x: Tensor) -> Tensor:
        """`[..., in_features]` to `[..., sum(sizes)]`, the layers' outputs one after another."""


def can_pack(weight: Tensor) -> bool:
    """Whether oneDNN's layout serves a linear layer's weight: bf16 on a CPU for which it has kernels in bf16.

    Without AVX-512 it has none, and refuses such weights.
    """
    return weight.dtype == torch.bfloat16 and weight.device.type == "cpu" and _onednn_has_bf16()


def _onednn_has_bf16() -> bool:
    available = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return bool(available and torch.ops.mkldnn._is_mkldnn_bf16_supported())


class PackedMatrix:
    """Weights of linear layers that are given the same input, as one matrix prepacked for oneDNN.

    Up to twice the bandwidth of the plain layout in bf16, so that verifying several tokens costs what one
    costs. Inference only.
    """

    def __init__(self, linears: list[nn.Linear]) -> None:
        weight = torch.cat([linear.weight.detach() for linear in linears])
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, _TYPICAL_ROWS)
        self._bias = None
        if any(linear.bias is not None for linear in linears):
            self._bias = torch.cat(
                [
                    linear.weight.new_zeros(linear.out_features) if linear.bias is None else linear.bias.detach()
                    for linear in linears
                ]
            )
        self.sizes = [linear.out_features for linear in linears]

    def product(self, x: Tensor) -> Tensor:
        """`[..., in_features]` to `[..., sum(sizes)]`, the layers' outputs one after another."""
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return out


class _SharedInput:
    """Layers over one `PackedMatrix`: the first one called computes for all of them, so that query, key and
    value projection (or gate and up) are one product."""

    def __init__(self, matrix: LinearMatrix) -> None:
        self._matrix = matrix
        self._input: Tensor | None = None
        self._outputs: dict[int, Tensor] = {}

    def output(self, member: int, x: Tensor) -> Tensor:
        if x is not self._input or member not in self._outputs:
            product = self._matrix.product(x)
            if len(self._matrix.sizes) == 1:
                return product
            self._input, self._outputs = x, dict(enumerate(torch.split(product, self._matrix.sizes, dim=-1)))
        output = self._outputs.pop(member)
        if not self._outputs:
            self._input = None
        return output


class PackedLinear(nn.Module):
    """Stands in a model for an `nn.Linear` that was packed."""

    def __init__(self, shared: _SharedInput, member: int) -> None:
        super().__init__()
        self._shared, self._member = shared, member

    def forward(self, x: Tensor) -> Tensor:
        return self._shared.output(self._member, x)


def pack_linears(
    model: nn.Module,
    run: Callable[[], Any],
    kernels: Library | None,
    quantised: Mapping[nn.Linear, int],
) -> int:
    """Replaces the model's bf16 CPU linear layers by packed ones; returns how many.

    For `kernels` of our own, which take those as such whose bits `quantised` tells, else for oneDNN. `run` runs the
    model once, which shows what layers share their input. Only exact `nn.Linear`s are replaced: a subclass may compute
    something else. The plain weights are freed unless something else (tied embeddings) still holds them.
    """
    places = [
        (module, name, child)
        for module in model.modules()
        for name, child in module.named_children()
        if type(child) is nn.Linear
        and (can_pack(child.weight) if kernels is None else child.weight.dtype == torch.bfloat16)
    ]
    if not places:
        return 0
    inputs = _inputs_seen([child for _, _, child in places], run)
    groups: dict[tuple[nn.Module, Tensor | nn.Linear, bool], list[tuple[str, nn.Linear]]] = {}
    for module, name, child in places:
        groups.setdefault((module, inputs.get(child, child), child in quantised), []).append((name, child))
    for (module, *_), members in groups.items():
        linears = [child for _, child in members]
        matrix = PackedMatrix(linears) if kernels is None else NativeMatrix.of(kernels, linears, quantised)
        shared = _SharedInput(matrix)
        for i, (name, _) in enumerate(members):
            setattr(module, name, PackedLinear(shared, i))
    return len(places)


def _inputs_seen(linears: list[nn.Linear], run: Callable[[], Any]) -> dict[nn.Linear, Tensor]:
    """The tensor each layer is given when the model runs; kept alive, so that no two are taken for one."""
    inputs: dict[nn.Linear, Tensor] = {}

    def see(linear: nn.Module, args: tuple[Tensor, ...]) -> None:
        assert isinstance(linear, nn.Linear)
        inputs[linear] = args[0]

    hooks = [linear.register_forward_pre_hook(see) for linear in linears]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return inputs
