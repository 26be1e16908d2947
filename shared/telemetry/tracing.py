"""OpenTelemetry set-up of one process, and the spans that its own instrumentation cannot make.

Nothing global is set: a service makes one `Telemetry` at start and hands it on. Without an endpoint
the tracer and meter are OpenTelemetry's no-ops and the SDK is not even imported.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from opentelemetry.context import Context
from opentelemetry.metrics import Meter, NoOpMeterProvider
from opentelemetry.trace import (
    NoOpTracerProvider,
    Span,
    SpanKind,
    Tracer,
    get_current_span,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from shared.telemetry.failure import Failure
from shared.telemetry.noted_span import NotedSpan
from shared.telemetry.prometheus import PrometheusPage

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import MetricReader
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace.id_generator import IdGenerator

    from shared.telemetry.noted_spans import NotedSpans

logger = logging.getLogger(__name__)

# Seconds one export may take, retries included; and all that is left may take at shutdown.
_EXPORT_SECONDS = 5
_SHUTDOWN_SECONDS = 5.0

_propagator = TraceContextTextMapPropagator()


@dataclass(frozen=True, slots=True)
class Telemetry:
    """One process's tracer and meter. `configure` makes it; `shutdown` ends it."""

    tracer: Tracer
    meter: Meter
    _flushes: tuple[Callable[[], None], ...] = ()
    _noted: NotedSpans | None = None

    @contextmanager
    def span(
        self,
        name: str,
        *,
        parent: Context | None = None,
        kind: SpanKind = SpanKind.INTERNAL,
        attributes: Mapping[str, AttributeValue] | None = None,
    ) -> Iterator[Span]:
        """A current span around a block of code, ended however the block ends.

        An exception is recorded and sets the status. So does cancellation, which OpenTelemetry's own
        context manager passes over: it sets `outrider.cancelled` and the status "cancelled".

        `parent` defaults to the current context.
        """
        with self.tracer.start_as_current_span(
            name,
            context=parent,
            kind=kind,
            attributes=attributes,
            record_exception=False,
            set_status_on_exception=False,
        ) as span:
            try:
                yield span
            except BaseException as error:
                if span.is_recording():
                    Failure.of(error).mark(span)
                raise

    @contextmanager
    def noted_span(self, name: str, parent: str) -> Iterator[NotedSpan]:
        """As `span`, but not current and made a little later: around what is so short that making a span would be a
        good part of it. `parent` is a `traceparent`; with an empty one nothing is traced."""
        span = NotedSpan(name, parent if self._noted is not None else "")
        try:
            yield span
        except BaseException as error:
            if span.parent:
                span.failure = Failure.of(error)
            raise
        finally:
            if span.parent:
                span.end_ns = time.time_ns()
                self._note(span)

    def record_span(
        self,
        name: str,
        traceparent: str,
        start_ns: int,
        end_ns: int,
        attributes: Mapping[str, AttributeValue] | None = None,
    ) -> None:
        """Emit a span that was measured elsewhere: an engine thread's work for one sequence.

        Worker streams carry many requests, so the parent is the `traceparent` of the sequence's own
        message; an empty one is not traced. Times are Unix nanoseconds (`time.time_ns()`).
        """
        if traceparent:
            self._note(NotedSpan(name, traceparent, start_ns, end_ns, attributes))

    def _note(self, span: NotedSpan) -> None:
        if self._noted is not None:
            self._noted.add(span)

    def shutdown(self) -> None:
        """Export what is left and stop. Blocks for at most 5 seconds, collector or not."""
        deadline = time.monotonic() + _SHUTDOWN_SECONDS
        threads = [threading.Thread(target=_flush, args=(flush,), daemon=True) for flush in self._flushes]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in threads):
            logger.warning("telemetry could not be flushed in %g seconds; the rest is dropped", _SHUTDOWN_SECONDS)


def configure(service_name: str, endpoint: str | None, page: PrometheusPage | None = None) -> Telemetry:
    """Telemetry of this process, exported by OTLP over gRPC to `endpoint`, unless that is None or "".

    Args:
        service_name: the resource's `service.name`, such as "outrider-router".
        endpoint: `http://host:port` or `host:port` in plain text, `https://host:port` over TLS.
        page: shows the metrics as well, and is closed with the telemetry.

    Raises:
        ValueError: the endpoint is none of these.

    An unreachable collector is no error, neither here nor later: spans and metrics are dropped.
    """
    if not endpoint:
        return _without_collector(service_name, page)
    scheme, separator, authority = endpoint.rpartition("://")
    if (separator and scheme not in ("http", "https")) or not authority.strip("/"):
        raise ValueError(
            f"telemetry endpoint is {endpoint!r}: must be host:port, http://host:port or https://host:port"
        )

    # Imported here because an untraced process should not pay for the SDK.
    from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    from shared.telemetry.noted_spans import NotedSpans

    resource = _resource(service_name)
    insecure = scheme != "https"
    # The exit hooks of the providers could hold up a dying process; shutdown() is called instead.
    processor = BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint, insecure=insecure, timeout=_EXPORT_SECONDS))

    def tracer_with(ids: IdGenerator | None = None) -> Tracer:
        provider = TracerProvider(resource=resource, shutdown_on_exit=False, id_generator=ids)
        provider.add_span_processor(processor)
        return provider.get_tracer("outrider")

    noted = NotedSpans(tracer_with, parent_context)

    def flush() -> None:
        noted.close()
        processor.shutdown()  # type: ignore[no-untyped-call]

    metric_exporter = OTLPMetricExporter(endpoint=endpoint, insecure=insecure, timeout=_EXPORT_SECONDS)
    meter, flushes = _meter(resource, [PeriodicExportingMetricReader(metric_exporter)], page)
    return Telemetry(tracer_with(), meter, (flush, *flushes), noted)


def _without_collector(service_name: str, page: PrometheusPage | None) -> Telemetry:
    tracer = NoOpTracerProvider().get_tracer("outrider")
    if page is None:
        return Telemetry(tracer, NoOpMeterProvider().get_meter("outrider"))
    meter, flushes = _meter(_resource(service_name), [], page)
    return Telemetry(tracer, meter, flushes)


def _resource(service_name: str) -> Resource:
    from opentelemetry.sdk.resources import Resource

    return Resource.create({"service.name": service_name, "service.instance.id": str(uuid.uuid4())})


def _meter(
    resource: Resource, readers: list[MetricReader], page: PrometheusPage | None
) -> tuple[Meter, tuple[Callable[[], None], ...]]:
    """A meter, and what ends it."""
    from opentelemetry.sdk.metrics import MeterProvider

    if page is not None:
        readers = [*readers, page.reader]
    provider = MeterProvider(readers, resource=resource, shutdown_on_exit=False)
    return provider.get_meter("outrider"), (provider.shutdown, *([] if page is None else [page.close]))


def traceparent(span: Span) -> str:
    """The span's W3C `traceparent`, for a message's field; "" if the span is not recorded."""
    if not span.is_recording():
        return ""
    carrier: dict[str, str] = {}
    _propagator.inject(carrier, set_span_in_context(span, Context()))
    return carrier["traceparent"]


def current_traceparent() -> str:
    """The W3C trace context of the span we are in; empty when not traced."""
    return traceparent(get_current_span())


def parent_context(traceparent: str) -> Context:
    """The context whose current span is the remote one named; an empty context if malformed or ""."""
    return _propagator.extract({"traceparent": traceparent}, Context())


def _flush(flush: Callable[[], None]) -> None:
    try:
        flush()
    except Exception as error:
        # Losing telemetry must not fail a shutdown.
        logger.warning("telemetry could not be flushed: %s", error)
