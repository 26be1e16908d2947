"""Linear layers with weights laid out beforehand for the CPU's matrix kernels."""

from __future__ import annotations

import torch
from torch import Tensor, nn

# Rows the layout is chosen for. oneDNN's choice hardly depends on it; small steps are the common ones.
_TYPICAL_ROWS = 8


class PackedLinear(nn.Module):
    """`nn.Linear` over weights prepacked for oneDNN: up to twice the bandwidth of the plain layout in bf16,
    so that verifying several tokens costs what one costs. Inference only."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        weight = linear.weight.detach()
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, _TYPICAL_ROWS)
        self._bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return out


def pack_linears(model: nn.Module) -> int:
    """Replaces the model's bf16 CPU linear layers by packed ones; returns how many.

    Only exact `nn.Linear`s: a subclass may compute something else. The plain weights are freed unless
    something else (tied embeddings) still holds them.
    """
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return 0
    packed = 0
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) is nn.Linear and child.weight.dtype == torch.bfloat16 and child.weight.device.type == "cpu":
                setattr(module, name, PackedLinear(child))
                packed += 1
    return packed
