"""The services' logs, for people: their JSON lines as `HH:MM:SS service message key=value`."""

from __future__ import annotations

import json
from datetime import datetime

from rich.text import Text

SERVICE_STYLES = {"router": "magenta", "target": "green", "draft": "yellow", "redis": "red", "stack": "cyan"}
LEVEL_STYLES = {"DEBUG": "dim", "WARNING": "yellow", "ERROR": "bold red", "CRITICAL": "bold red"}

_TIME, _LEVEL, _MESSAGE = "time", "level", "message"


def render_log(name: str, line: str) -> Text:
    """One line of process `name` ("target-0"); what is not a JSON record is shown as it is."""
    record = _parse(line)
    level = str(record.pop(_LEVEL, "INFO"))
    text = Text(_clock(record.pop(_TIME, None)), style="dim")
    text.append(f" {name:<9}", style=SERVICE_STYLES.get(name.partition("-")[0], ""))
    text.append(f" {record.pop(_MESSAGE, '')}", style=LEVEL_STYLES.get(level, "not dim"))
    for key, value in record.items():
        if key not in ("service", "logger"):
            text.append(f" {key}=", style="dim").append(str(value), style="not dim")
    return text


def _parse(line: str) -> dict[str, object]:
    try:
        record = json.loads(line)
    except ValueError:
        record = None
    return record if isinstance(record, dict) and _MESSAGE in record else {_MESSAGE: line}


def _clock(time: object) -> str:
    """Local HH:MM:SS of an ISO 8601 time; of now if there is none."""
    try:
        moment = datetime.fromisoformat(str(time)).astimezone()
    except ValueError:
        moment = datetime.now()
    return f"{moment:%H:%M:%S}"
