"""Weights of a linear layer, quantised: whole numbers and what they are multiplied by."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# Weights with a scale in common: all of an output's in 8 bits, as in LLM.int8 (Dettmers et al. 2022), so many of them
# in 4, where a few large ones would cost all others their precision (GPTQ, Frantar et al. 2022, AWQ, Lin et al. 2023).
GROUP = 64
_MOST = {8: 127, 4: 7}


class QuantisedWeight(NamedTuple):
    """`values` `[out, in]` int8, of which only `bits` are used; `scales` `[out, groups]` float32, one for each `group`
    inputs, of which the last ones may be fewer."""

    values: Tensor
    scales: Tensor
    bits: int
    group: int

    @classmethod
    def of(cls, weight: Tensor, bits: int) -> QuantisedWeight:
        """The nearest to `weight` `[out, in]`, rounded to 8 or 4 bits, symmetrically about 0; of what they stand for,
        in bf16 too, the same again. Raises ValueError if it is not finite."""
        outputs, inputs = weight.shape
        group = inputs if bits == 8 else GROUP
        parts = torch.nn.functional.pad(weight.float(), (0, -inputs % group)).view(outputs, -1, group)
        scales = parts.abs().amax(-1) / _MOST[bits]
        if not scales.isfinite().all():
            raise ValueError("its weights are not finite")
        values = (parts / scales.masked_fill(scales == 0, 1).unsqueeze(-1)).round_()
        return cls(values.view(outputs, -1)[:, :inputs].to(torch.int8).contiguous(), scales, bits, group)

    def dequantised(self) -> Tensor:
        """The weights that they stand for, `[out, in]` in float32."""
        return self.values * self.scales.repeat_interleave(self.group, 1)[:, : self.values.shape[1]]
