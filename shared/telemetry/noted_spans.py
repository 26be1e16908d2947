"""Spans of what must not wait: noted when they end, and made into OpenTelemetry's by a thread of their own.

Behind a step of a model nothing of the SDK is in any cache: a span made there takes 200 µs of the round that it tells
of, where one of many takes 20.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Final

from opentelemetry.context import Context
from opentelemetry.sdk.trace.id_generator import IdGenerator, RandomIdGenerator
from opentelemetry.trace import Tracer

from shared.telemetry.noted_span import NotedSpan

logger = logging.getLogger(__name__)

# How long a span waits, and how many do at most before they are made at once. Where they come faster than they can be
# made, the oldest are dropped.
_SECONDS: Final = 0.5
_MANY: Final = 64
_MOST: Final = 4096


class NotedSpans:
    """Takes notes from any thread, without locks or calls into the SDK."""

    def __init__(
        self,
        tracer_with: Callable[[IdGenerator], Tracer],
        parent_context: Callable[[str], Context],
    ) -> None:
        """`tracer_with` makes a tracer whose spans have these ids, `parent_context` a context of a `traceparent`."""
        self._ids = _GivenIds()
        self._tracer = tracer_with(self._ids)
        self._parent_context = parent_context
        self._notes: deque[NotedSpan] = deque(maxlen=_MOST)
        self._num_dropped = 0
        self._wake = threading.Event()
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="noted-spans", daemon=True)
        self._thread.start()

    def add(self, note: NotedSpan) -> None:
        self._num_dropped += len(self._notes) == _MOST
        self._notes.append(note)
        if len(self._notes) >= _MANY and not self._wake.is_set():
            self._wake.set()

    def close(self) -> None:
        """Makes what was noted, and ends the thread. Nothing may be added any more."""
        self._ended = True
        self._wake.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended:
            self._wake.wait(_SECONDS)
            self._wake.clear()
            self._make_all()
        self._make_all()

    def _make_all(self) -> None:
        # Of those that come meanwhile is the next pass.
        for _ in range(len(self._notes)):
            try:
                self._make(self._notes.popleft())
            except Exception:
                logger.warning("a span could not be made", exc_info=True)
        num_dropped, self._num_dropped = self._num_dropped, 0
        if num_dropped:
            logger.warning("spans came faster than they could be made: %d are lost", num_dropped)

    def _make(self, note: NotedSpan) -> None:
        self._ids.span_id = note.span_id
        context = self._parent_context(note.parent)
        span = self._tracer.start_span(note.name, context, attributes=note.attributes, start_time=note.start_ns)
        if note.failure is not None:
            note.failure.mark(span, note.end_ns)
        span.end(note.end_ns)


class _GivenIds(RandomIdGenerator):
    """That of the span which is made: its children were told of it long before."""

    span_id = 0

    def generate_span_id(self) -> int:
        return self.span_id
