"""How a layer attends."""

from __future__ import annotations

from typing import NamedTuple


class LayerAttention(NamedTuple):
    """What a model hands its attention function in one layer."""

    num_heads: int
    scale: float
    sliding_window: int | None
    softcap: float | None
