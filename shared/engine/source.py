"""Where a model comes from: a local folder, or a name on the hub."""

from __future__ import annotations

import re
from pathlib import Path

from shared.settings import StartupError

# "name" or "owner/name", as the hub has them.
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


def check_source(source: str) -> None:
    """Raises StartupError for what is neither a local folder nor could be a hub name."""
    if Path(source).is_dir():
        return
    if source.startswith((".", "/", "~")) or not _HUB_NAME.fullmatch(source):
        raise StartupError(f"there is no model folder {source}")


def cannot_be_loaded(source: str, why: str) -> str:
    """What a line says of a source behind its name: whoever mistyped a folder's reads of no hub first."""
    if Path(source).is_dir():
        return f"cannot be loaded: {why}"
    return f"is no folder here, and cannot be loaded from the hub: {why}"
