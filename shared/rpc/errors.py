"""The exceptions that become gRPC statuses, and the one place where they do.

    OutriderError
    ├── InvalidArgument       INVALID_ARGUMENT     a field is out of its limits
    ├── ResourceExhausted     RESOURCE_EXHAUSTED   full; says when to come again
    ├── Aborted               ABORTED              the caller let its side stall
    ├── Unavailable           UNAVAILABLE          not ready, draining, or a worker is gone
    ├── DeadlineExceeded      DEADLINE_EXCEEDED
    ├── Unauthenticated       UNAUTHENTICATED
    ├── PermissionDenied      PERMISSION_DENIED
    ├── NotFound              NOT_FOUND            no such ticket, or not any more
    ├── FailedPrecondition    FAILED_PRECONDITION
    └── Internal              INTERNAL             a bug

Anything else that leaves a handler is INTERNAL too, and its text stays in the log. Details follow
google.rpc's error model (https://google.aip.dev/193) in the `grpc-status-details-bin` trailer.
"""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc.error_details_pb2 import BadRequest, RetryInfo  # type: ignore[import-untyped]
from google.rpc.status_pb2 import Status  # type: ignore[import-untyped]

# The message and its details travel in headers, of which a peer need accept only 8 KiB.
_MAX_MESSAGE_CHARS = 1000
_MAX_VALUE_CHARS = 60


class OutriderError(Exception):
    """An error with a gRPC status. The message is meant for the caller."""

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.INTERNAL

    def details(self) -> list[Message]:
        """What a program can read of it: messages of google.rpc."""
        return []


class InvalidArgument(OutriderError):
    """A request's `field` holds `value`, which is not within `limit` ("in [0, 100]", "at most 16")."""

    code = grpc.StatusCode.INVALID_ARGUMENT

    def __init__(self, field: str, value: object, limit: str) -> None:
        self.field = field
        self.limit = limit
        self._description = f"is {shorten(value)}: must be {limit}"
        super().__init__(f"{field} {self._description}")

    def details(self) -> list[Message]:
        violation = BadRequest.FieldViolation(field=self.field, description=_clean(self._description))
        return [BadRequest(field_violations=[violation])]


class ResourceExhausted(OutriderError):
    """No room now; the caller may try again after `retry_after_seconds`."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED

    def __init__(self, message: str, retry_after_seconds: float) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds

    def details(self) -> list[Message]:
        delay = Duration()
        delay.FromMilliseconds(round(self.retry_after_seconds * 1000))
        return [RetryInfo(retry_delay=delay)]


class Aborted(OutriderError):
    """Ended because of what the caller did not do; the same call may be made again, if it then does."""

    code = grpc.StatusCode.ABORTED


class Unavailable(OutriderError):
    """Not ready, draining, or what this depends on is gone; trying again may help."""

    code = grpc.StatusCode.UNAVAILABLE


class DeadlineExceeded(OutriderError):
    """The caller's time is over."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED


class Unauthenticated(OutriderError):
    """The caller did not say, or not truly, who it is."""

    code = grpc.StatusCode.UNAUTHENTICATED


class PermissionDenied(OutriderError):
    """The caller is known and may not do this."""

    code = grpc.StatusCode.PERMISSION_DENIED


class NotFound(OutriderError):
    """What the call names is not here, or not any more."""

    code = grpc.StatusCode.NOT_FOUND


class FailedPrecondition(OutriderError):
    """The system is not in the state that this call needs; trying again will not help."""

    code = grpc.StatusCode.FAILED_PRECONDITION


class Internal(OutriderError):
    """A bug, with a message that may be shown."""


class RpcStatus(NamedTuple):
    """The arguments of `ServicerContext.abort`."""

    code: grpc.StatusCode
    message: str
    trailing_metadata: tuple[tuple[str, bytes], ...]


def to_status(error: BaseException) -> RpcStatus:
    """The gRPC status of an exception; of any but an `OutriderError`, INTERNAL and nothing more."""
    if not isinstance(error, OutriderError):
        return RpcStatus(grpc.StatusCode.INTERNAL, "internal error", ())
    message = _clean(str(error))
    details = error.details()
    if not details:
        return RpcStatus(error.code, message, ())
    status = Status(code=error.code.value[0], message=message)
    for detail in details:
        status.details.add().Pack(detail)
    return RpcStatus(error.code, message, (("grpc-status-details-bin", status.SerializeToString()),))


def shorten(value: object) -> str:
    """`value` for an error message: its repr, or of a long one the beginning and the length."""
    if isinstance(value, str | bytes):
        if len(value) <= _MAX_VALUE_CHARS:
            return repr(value)
        unit = "characters" if isinstance(value, str) else "bytes"
        return f"{value[:_MAX_VALUE_CHARS]!r}… ({len(value)} {unit})"
    if isinstance(value, Sequence) and len(value) > 6:
        return f"[{', '.join(reprlib.repr(item) for item in value[:6])}, …] ({len(value)} entries)"
    text = reprlib.repr(value)
    return text if len(text) <= _MAX_VALUE_CHARS else text[:_MAX_VALUE_CHARS] + "…"


def _clean(text: str) -> str:
    """`text` as a header can carry it: bounded, and valid UTF-8."""
    if len(text) > _MAX_MESSAGE_CHARS:
        text = text[:_MAX_MESSAGE_CHARS] + "…"
    return text.encode("utf-8", "replace").decode("utf-8")
