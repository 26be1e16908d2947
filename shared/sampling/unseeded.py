"""Draws by random numbers that belong to nobody."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shared.sampling.filters import sampling_logprobs
from shared.sampling.kernels import kernels_for, scores_for_kernels
from shared.sampling.rejection import draw
from shared.sampling.rows import SampleRows


def draw_unseeded(logits: Tensor, rows: Sequence[SampleRows], generator: torch.Generator | None = None) -> Tensor:
    """Each row's token [R] int64 from raw `logits` [R, V], for sequences that are sampled without a seed, by random
    numbers from `generator` or else torch's global one: by inversion of the cumulated probabilities."""
    kernels = kernels_for(logits)
    if kernels is None:
        return draw(sampling_logprobs(logits, rows).exp_(), generator)
    scores, temperatures = scores_for_kernels(logits, rows)
    uniforms = torch.rand(len(logits), dtype=torch.float64, generator=generator)
    return kernels.draw_unseeded(scores, temperatures, uniforms)
