"""How a span ended that did not end well."""

from __future__ import annotations

import asyncio
import traceback
from dataclasses import dataclass

from opentelemetry.trace import Span, Status, StatusCode

from shared.telemetry.attributes import CANCELLED, ERROR_TYPE


@dataclass(frozen=True, slots=True)
class Failure:
    """What is said of it on the span. Not the error itself, whose frames would live as long as this."""

    message: str
    event: str
    attributes: dict[str, str | bool]
    event_attributes: dict[str, str]

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Cancellation, over which OpenTelemetry's own context manager passes, is one as well."""
        if isinstance(error, (asyncio.CancelledError, GeneratorExit)):
            return cls("cancelled", "cancelled", {CANCELLED: True}, {})
        kind, message = type(error), _text(error)
        name = kind.__qualname__
        described = {
            "exception.type": name if kind.__module__ == "builtins" else f"{kind.__module__}.{name}",
            "exception.message": message,
            "exception.stacktrace": _encodable("".join(traceback.format_exception(error))),
        }
        return cls(message, "exception", {ERROR_TYPE: name}, described)

    def mark(self, span: Span, at_ns: int | None = None) -> None:
        """Says it on a span: attributes, an event, of that time (Unix nanoseconds) or now, and the status."""
        span.set_attributes(self.attributes)
        span.add_event(self.event, self.event_attributes, timestamp=at_ns)
        span.set_status(Status(StatusCode.ERROR, self.message))


def _text(error: BaseException) -> str:
    try:
        return _encodable(str(error))
    except Exception:
        return "an error that cannot be shown"


def _encodable(text: str) -> str:
    """A file's name may be no Unicode, and what cannot be exported takes the spans beside it with it."""
    return text.encode(errors="replace").decode()
