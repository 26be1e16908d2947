"""A caller's deadline, handed down: gRPC does not pass it to further calls by itself."""

from __future__ import annotations

from typing import Any

import grpc

from shared.rpc.errors import DeadlineExceeded


def remaining(context: grpc.aio.ServicerContext[Any, Any]) -> float | None:
    """Seconds that the caller still waits, 0 if its time is over; None if it set no deadline."""
    seconds: float | None = context.time_remaining()
    return seconds


def child_timeout(context: grpc.aio.ServicerContext[Any, Any], limit: float | None = None) -> float | None:
    """The `timeout` of a call made on the caller's behalf: its remaining time, at most `limit` seconds.

    None (no bound) if there is neither.

    Raises:
        DeadlineExceeded: the caller's time is over; there is no use in calling.
    """
    seconds = remaining(context)
    if seconds is None:
        return limit
    if seconds <= 0:
        raise DeadlineExceeded("the request's deadline is over")
    return seconds if limit is None else min(seconds, limit)
