"""Draws and what they were drawn from, in one tensor: one copy to the host."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shared.sampling.sampled import Candidates, SampledTokens


def pack(tokens: Tensor, ids: Tensor, probs: Tensor) -> Tensor:
    """`tokens` [R, 1] drawn from `ids` [R, K] by `probs` [R, K] float32, those above 0 first: [R, 2 + 2 K] int32, which
    holds token ids, and float32 by its bits."""
    counts = (probs > 0).sum(1, keepdim=True)
    return torch.cat((tokens.int(), counts.int(), ids.int(), probs.view(torch.int32)), 1)


def unpack(packed: NDArray[np.int32]) -> Iterator[SampledTokens]:
    """Of each row."""
    probs_at = 1 + packed.shape[1] // 2
    for line in packed:
        size = int(line[1])
        candidates = Candidates(size, line[2 : 2 + size].tobytes(), line[probs_at : probs_at + size].tobytes())
        yield SampledTokens((int(line[0]),), candidates=candidates)
