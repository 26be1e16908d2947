"""Settings of a target worker."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from shared.engine.settings import EngineSettings
from shared.settings import RedisUrl


class TargetSettings(EngineSettings):
    """A target worker: its engine, and where it publishes its prefix blocks."""

    service: ClassVar[str] = "target"

    port: int = Field(default=50052, ge=0, le=65535, description="Port to listen on; 0 picks a free one.")
    redis_url: RedisUrl | None = Field(
        default=None,
        description="Redis that holds the prefix index (redis://, rediss:// or unix://); unset: no sharing.",
    )
