"""Client channels, and the trace context that goes with a call."""

from __future__ import annotations

import grpc
from opentelemetry.context import Context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from shared.rpc.options import CHANNEL_OPTIONS

_propagator = TraceContextTextMapPropagator()


def connect(address: str) -> grpc.aio.Channel:
    """A channel to `address` ("host:port" or "unix:path") with connections of its own.

    It connects at the first call, and again by itself after a loss. No call is repeated.
    """
    return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)


def trace_metadata(context: Context | None = None) -> tuple[tuple[str, str], ...]:
    """The W3C trace context of `context` (default: the current one) as a call's `metadata`.

    Empty if nothing is traced. Streams of workers need none: their messages carry `traceparent`.
    """
    carrier: dict[str, str] = {}
    _propagator.inject(carrier, context)
    return tuple(carrier.items())
