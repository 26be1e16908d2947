"""An OTLP collector inside the test process: what services export, as plain Python."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

import grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric


@dataclass(frozen=True)
class ReceivedSpan:
    """One exported span; ids in lower-case hex, `parent_id` "" for a root, times in Unix nanoseconds."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: int
    start_ns: int
    end_ns: int
    attributes: dict[str, object]
    events: tuple[str, ...]
    # 0 unset, 1 ok, 2 error.
    status: int
    status_message: str


@dataclass
class OtlpReceiver:
    """Spans and metrics received so far; `endpoint` is where to send them."""

    endpoint: str = ""
    spans: list[ReceivedSpan] = field(default_factory=list)
    metrics: list[tuple[str, Metric]] = field(default_factory=list)
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def wait_for(self, predicate: Callable[[OtlpReceiver], bool], timeout: float) -> None:
        """Return once `predicate(self)` holds; TimeoutError with what has come after `timeout` seconds.

        Blocks its thread: from a coroutine, call it through `asyncio.to_thread`.
        """
        deadline = time.monotonic() + timeout
        with self._changed:
            while not predicate(self):
                if not self._changed.wait(deadline - time.monotonic()):
                    names = [f"{span.service}: {span.name}" for span in self.spans]
                    raise TimeoutError(f"not within {timeout} s; spans {names}, metrics {self.metric_names()}")

    def named(self, name: str) -> list[ReceivedSpan]:
        """All spans of that name."""
        return [span for span in self.spans if span.name == name]

    def span(self, name: str) -> ReceivedSpan:
        """The only span of that name."""
        (only,) = self.named(name)
        return only

    def metric(self, name: str) -> Metric:
        """The latest export of the metric of that name."""
        return [metric for _, metric in self.metrics if metric.name == name][-1]

    def metric_names(self) -> set[str]:
        return {metric.name for _, metric in self.metrics}

    def add_spans(self, spans: Iterable[ReceivedSpan]) -> None:
        with self._changed:
            self.spans.extend(spans)
            self._changed.notify_all()

    def add_metrics(self, metrics: Iterable[tuple[str, Metric]]) -> None:
        with self._changed:
            self.metrics.extend(metrics)
            self._changed.notify_all()


class _TraceServicer(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self, receiver: OtlpReceiver) -> None:
        self._receiver = receiver

    def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: object
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        self._receiver.add_spans(_spans(request))
        return trace_service_pb2.ExportTraceServiceResponse()


class _MetricsServicer(metrics_service_pb2_grpc.MetricsServiceServicer):
    def __init__(self, receiver: OtlpReceiver) -> None:
        self._receiver = receiver

    def Export(
        self, request: metrics_service_pb2.ExportMetricsServiceRequest, context: object
    ) -> metrics_service_pb2.ExportMetricsServiceResponse:
        self._receiver.add_metrics(
            (_service(resource.resource.attributes), metric)
            for resource in request.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
        )
        return metrics_service_pb2.ExportMetricsServiceResponse()


@contextmanager
def otlp_receiver() -> Iterator[OtlpReceiver]:
    """A collector on a free port of this machine, for as long as the block runs."""
    receiver = OtlpReceiver()
    server = grpc.server(ThreadPoolExecutor(max_workers=2, thread_name_prefix="otlp"))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(_TraceServicer(receiver), server)  # type: ignore[no-untyped-call]
    metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(_MetricsServicer(receiver), server)  # type: ignore[no-untyped-call]
    receiver.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield receiver
    finally:
        server.stop(None).wait()


def _spans(request: trace_service_pb2.ExportTraceServiceRequest) -> Iterator[ReceivedSpan]:
    for resource in request.resource_spans:
        service = _service(resource.resource.attributes)
        for scope in resource.scope_spans:
            for span in scope.spans:
                yield ReceivedSpan(
                    service=service,
                    name=span.name,
                    trace_id=span.trace_id.hex(),
                    span_id=span.span_id.hex(),
                    parent_id=span.parent_span_id.hex(),
                    kind=span.kind,
                    start_ns=span.start_time_unix_nano,
                    end_ns=span.end_time_unix_nano,
                    attributes={item.key: _value(item.value) for item in span.attributes},
                    events=tuple(event.name for event in span.events),
                    status=span.status.code,
                    status_message=span.status.message,
                )


def _service(attributes: Iterable[KeyValue]) -> str:
    return next(item.value.string_value for item in attributes if item.key == "service.name")


def _value(value: AnyValue) -> object:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return getattr(value, kind) if kind else None
