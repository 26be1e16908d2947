from __future__ import annotations

import grpc
import pytest
from google.rpc.error_details_pb2 import BadRequest, RetryInfo  # type: ignore[import-untyped]
from google.rpc.status_pb2 import Status  # type: ignore[import-untyped]

from shared.rpc import errors


@pytest.mark.parametrize(
    ("error", "number"),
    [
        (errors.InvalidArgument("n", 0, "at least 1"), 3),
        (errors.DeadlineExceeded("late"), 4),
        (errors.PermissionDenied("no"), 7),
        (errors.ResourceExhausted("full", 1.0), 8),
        (errors.FailedPrecondition("other model"), 9),
        (errors.Internal("a bug"), 13),
        (errors.Unavailable("draining"), 14),
        (errors.Unauthenticated("who"), 16),
    ],
)
def test_each_error_has_its_status_number(error: errors.OutriderError, number: int) -> None:
    status = errors.to_status(error)
    assert status.code.value[0] == number
    assert status.message == str(error)


def test_invalid_argument_names_field_value_and_limit() -> None:
    code, message, metadata = errors.to_status(errors.InvalidArgument("temperature", -1.0, "in [0, 100]"))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert message == "temperature is -1.0: must be in [0, 100]"
    status = Status.FromString(dict(metadata)["grpc-status-details-bin"])
    assert (status.code, status.message) == (3, message)
    detail = BadRequest()
    assert status.details[0].Unpack(detail)
    assert detail.field_violations[0].field == "temperature"


@pytest.mark.parametrize(("seconds", "expected"), [(0.25, (0, 250_000_000)), (2.5, (2, 500_000_000)), (0.0, (0, 0))])
def test_resource_exhausted_says_when_to_come_again(seconds: float, expected: tuple[int, int]) -> None:
    metadata = errors.to_status(errors.ResourceExhausted("queue is full", seconds)).trailing_metadata
    detail = RetryInfo()
    assert Status.FromString(dict(metadata)["grpc-status-details-bin"]).details[0].Unpack(detail)
    assert (detail.retry_delay.seconds, detail.retry_delay.nanos) == expected


@pytest.mark.parametrize("error", [ValueError("secret path"), KeyError("secret path"), MemoryError("secret path")])
def test_any_other_exception_tells_the_caller_nothing(error: Exception) -> None:
    assert errors.to_status(error) == (grpc.StatusCode.INTERNAL, "internal error", ())


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (float("nan"), "nan"),
        ("short", "'short'"),
        ("x" * 10_000_000, "'" + "x" * 60 + "'… (10000000 characters)"),
        (b"\xff" * 100, repr(b"\xff" * 60) + "… (100 bytes)"),
        (list(range(1000)), "[0, 1, 2, 3, 4, 5, …] (1000 entries)"),
    ],
)
def test_a_value_is_shown_shortened(value: object, expected: str) -> None:
    assert errors.shorten(value) == expected


def test_a_status_always_fits_a_header() -> None:
    """Whatever the value: bounded, and encodable (a lone surrogate is not)."""
    for text in ("é" * 1_000_000, "\udc80" * 50, "\n\0"):
        for error in (errors.Unavailable(text), errors.InvalidArgument("stop", text, text)):
            status = errors.to_status(error)
            assert len(status.message.encode()) < 4096
            assert sum(len(value) for _, value in status.trailing_metadata) < 8192
