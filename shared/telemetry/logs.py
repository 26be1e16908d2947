"""Logs as JSON lines on stderr, tied to traces by their ids."""

from __future__ import annotations

import json
import logging
import sys
import time
from datetime import UTC, datetime
from typing import Final

from opentelemetry.trace import format_span_id, format_trace_id, get_current_span

LEVELS: Final = ("DEBUG", "INFO", "WARNING", "ERROR")

# Roots of our own loggers; everybody else's speak from WARNING up.
_OURS: Final = ("services", "shared")

# A collector that is down fails every export; one line a minute says so well enough.
_EXPORT_FAILURE_SECONDS: Final = 60.0

_STANDARD_FIELDS: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def configure_logging(service: str, level: str) -> None:
    """Send this process's logs to stderr as JSON lines, replacing what was configured before.

    Each line has time (ISO 8601, UTC), level, service, logger and message; the `extra` of the call;
    trace_id and span_id if a span is current; the traceback, if there is one, as exception.

    Where transformers is used, call this once that is imported: its import installs a handler that
    writes plain text.

    Args:
        service: names this process in each line, such as "router".
        level: DEBUG, INFO, WARNING or ERROR (in any case), for Outrider's own loggers. Other
            libraries' are heard from WARNING up, or from `level` if that is higher.

    Raises:
        ValueError: the level is none of these.
    """
    name = level.upper()
    if name not in LEVELS:
        raise ValueError(f"log level is {level!r}: must be one of {', '.join(LEVELS)}")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter(service))
    handler.addFilter(_ExportFailures())
    others = max(logging.WARNING, logging.getLevelNamesMapping()[name])
    logging.basicConfig(level=others, handlers=[handler], force=True)
    for ours in _OURS:
        logging.getLogger(ours).setLevel(name)
    # transformers brings a handler of its own that writes plain text; its records belong with the rest.
    transformers = logging.getLogger("transformers")
    transformers.handlers.clear()
    transformers.propagate = True
    logging.captureWarnings(True)


class _JsonFormatter(logging.Formatter):
    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "service": self._service,
            "logger": record.name,
            "message": record.getMessage(),
        }
        for name, value in vars(record).items():
            # An extra never replaces a field of ours.
            if name not in _STANDARD_FIELDS and name not in line:
                line[name] = value
        span = get_current_span().get_span_context()
        if span.is_valid:
            line["trace_id"] = format_trace_id(span.trace_id)
            line["span_id"] = format_span_id(span.span_id)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class _ExportFailures(logging.Filter):
    """Passes at most one of OpenTelemetry's own records a minute."""

    def __init__(self) -> None:
        super().__init__()
        self._quiet_until = 0.0

    def filter(self, record: logging.LogRecord) -> bool:
        if not record.name.startswith("opentelemetry."):
            return True
        now = time.monotonic()
        if now < self._quiet_until:
            return False
        self._quiet_until = now + _EXPORT_FAILURE_SECONDS
        return True
