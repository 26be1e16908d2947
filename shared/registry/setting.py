"""The setting that tells deployments apart."""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import AfterValidator

from shared.registry.keys import deployment_name

Deployment = Annotated[str, AfterValidator(deployment_name)]

DEPLOYMENT_DESCRIPTION: Final = (
    "Name of the routers and workers that find each other in Redis: up to 64 of a-z, 0-9, dash, dot, underscore."
)
