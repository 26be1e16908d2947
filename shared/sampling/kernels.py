"""Kernels that draw from logits in the CPU's memory, where there are any."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from shared.sampling.filters import adjusts, narrows, sampling_scores
from shared.sampling.rows import SampleRows

Likeliest = tuple[list[list[int]], list[list[float]]]
"""Of each row ids, best first, and, by a softmax of all, logprobs; not finite where there are fewer."""


class DrawKernels(Protocol):
    """For scores [R, V] float32, of each row with the temperature that they are still to be divided by, 0 for those of
    greedy sequences, and the `noise_key`."""

    def draw(self, scores: Tensor, keys: Sequence[int], temperatures: Sequence[float]) -> Tensor:
        """See `coupled.draw_coupled`."""

    def likeliest(self, scores: Tensor, keys: Sequence[int], temperatures: Sequence[float], most: int) -> Likeliest:
        """See `coupled.likeliest_coupled`; `most` is at least 1."""

    def draw_unseeded(self, scores: Tensor, temperatures: Sequence[float], uniforms: Tensor) -> Tensor:
        """See `unseeded.draw_unseeded`; none of them is greedy. `uniforms` [R] float64: by which each is drawn, in
        [0, 1)."""


_kernels: DrawKernels | None = None


def draw_by(kernels: DrawKernels | None) -> None:
    """From now on these serve."""
    global _kernels
    _kernels = kernels


def kernels_for(logits: Tensor) -> DrawKernels | None:
    return _kernels if logits.device.type == "cpu" else None


def scores_for_kernels(logits: Tensor, rows: Sequence[SampleRows]) -> tuple[Tensor, list[float]]:
    """Of `logits` [R, V] the scores and temperatures that kernels take, who do what they can themselves."""
    temperatures = temperatures_of(rows)
    if any(narrows(sequence.params) or adjusts(sequence) for sequence in rows):
        return sampling_scores(logits, rows), [float(temperature > 0) for temperature in temperatures]
    return logits if logits.dtype == torch.float32 else logits.float(), temperatures


def temperatures_of(rows: Sequence[SampleRows]) -> list[float]:
    """Of each row; 0 for those of greedy sequences."""
    return [
        0.0 if sequence.params.greedy else sequence.params.temperature
        for sequence in rows
        for _ in range(sequence.num_rows)
    ]
