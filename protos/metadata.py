"""Adds to the server's dependencies the stubs of its very version; run by hatchling when it is built or installed."""

from __future__ import annotations

from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class StubsOfThisVersion(MetadataHookInterface):
    PLUGIN_NAME = "custom"

    def update(self, metadata: dict[str, Any]) -> None:
        metadata["dependencies"] = [f"outrider-client=={metadata['version']}", *self.config["dependencies"]]
