"""Draws of steps that follow one another with nothing waited for in between."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from shared.sampling.rows import SampleRows
from shared.sampling.sampled import SampledTokens


class Draws(Protocol):
    """One draw a step of S sequences, each from the logits behind the one before it."""

    def draw(self, logits: Tensor) -> Tensor:
        """Those of the next step, from its logits `[S, vocab_size]`: token ids `[S]` int64 on their device."""

    def take(self) -> list[list[SampledTokens]]:
        """All of them, by steps; waits for the device."""


DrawAhead = Callable[[Sequence[SampleRows], int, int, torch.device], Draws | None]
"""Of sequences with one row each, so many steps' draws from a vocabulary of such a size; None where one depends on more
than its step's logits."""
