"""Who drafts, by the name that settings, spans and metrics have for it."""

from __future__ import annotations

from typing import Final

from outrider.v1 import inference_pb2

SOURCES: Final = {
    "model": inference_pb2.DRAFT_SOURCE_MODEL,
    "suffix": inference_pb2.DRAFT_SOURCE_SUFFIX,
    "target": inference_pb2.DRAFT_SOURCE_TARGET,
}
SOURCE_NAMES: Final = {source: name for name, source in SOURCES.items()}
