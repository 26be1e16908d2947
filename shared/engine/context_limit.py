"""How long a context a model is served with, so that it stays the model that transformers runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from transformers import PreTrainedConfig

# Where a model names no limit.
_UNLIMITED = 1 << 20


class ContextLimit(NamedTuple):
    """`num_tokens`: prompt and output together. `reason`: why it is less than the model's own limit, else empty."""

    num_tokens: int
    reason: str


def context_limit(config: PreTrainedConfig, windows: Sequence[int | None]) -> ContextLimit:
    """The longest context for a text model; `windows`: how far each of its layers was seen to let attention look.

    A model's own limit is `max_position_embeddings`. It is served with less where more would be another model: where
    its layers look less far than they say to the attention function, as the mask alone tells them; and where rotary
    frequencies change with the longest sequence of a step (LongRoPE, Ding et al. 2024), so that a sequence would
    depend on its company and on how its prompt was cut.
    """
    own: int = getattr(config, "max_position_embeddings", None) or _UNLIMITED
    limits = [
        *(ContextLimit(window, "layers attend no further by their mask alone") for window in _hidden(config, windows)),
        *(ContextLimit(most, "beyond it rotary frequencies are others") for most in _rotary_limits(config)),
    ]
    return min((limit for limit in limits if limit.num_tokens < own), default=ContextLimit(own, ""))


def _hidden(config: PreTrainedConfig, windows: Sequence[int | None]) -> Iterator[int]:
    """Windows and chunks that the configuration names, where no window was seen."""
    kinds = getattr(config, "layer_types", None)
    for kind, name, switch in (
        ("sliding_attention", "sliding_window", "use_sliding_window"),
        ("chunked_attention", "attention_chunk_size", ""),
    ):
        size = getattr(config, name, None)
        if not size or not getattr(config, switch, True):
            continue
        if kinds is None:  # the same for all
            seen = windows if all(window is None for window in windows) else ()
        else:
            seen = [window for each, window in zip(kinds, windows, strict=False) if each == kind]
        if any(window is None for window in seen):
            yield size


def _rotary_limits(config: PreTrainedConfig) -> Iterator[int]:
    """Where frequencies change. Those of dynamic scaling do so at `max_position_embeddings` only."""
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    # Of all layers, or of each type of layer.
    for parameters in (rope, *(each for each in rope.values() if isinstance(each, dict))):
        if parameters.get("rope_type") == "longrope":
            yield parameters.get("original_max_position_embeddings") or config.original_max_position_embeddings
