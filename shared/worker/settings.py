"""Settings of a worker, draft or target, beside its engine: how routers find it."""

from __future__ import annotations

from pydantic import Field

from shared.engine.settings import EngineSettings
from shared.registry.keys import DEFAULT_DEPLOYMENT
from shared.registry.setting import DEPLOYMENT_DESCRIPTION, Deployment
from shared.settings import Address, RedisUrl


class WorkerSettings(EngineSettings):
    """A worker: its engine, and where it registers."""

    redis_url: RedisUrl | None = Field(
        default=None,
        description="Redis where it registers, and publishes its prefix blocks (redis://, rediss:// or unix://).",
    )
    deployment: Deployment = Field(default=DEFAULT_DEPLOYMENT, description=DEPLOYMENT_DESCRIPTION)
    insecure: bool = Field(
        default=False, description="Listen beyond this machine without certificates or a token: anybody may call."
    )
    advertise: Address | None = Field(
        default=None, description="host:port where others reach this worker; unset: where it listens."
    )
