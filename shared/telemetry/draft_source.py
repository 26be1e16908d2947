"""Who drafted, as spans and metrics say it."""

from __future__ import annotations

from outrider.v1 import inference_pb2


def source_name(source: inference_pb2.DraftSource) -> str:
    """model, suffix or target."""
    return inference_pb2.DraftSource.Name(source).removeprefix("DRAFT_SOURCE_").lower()
