"""A span as it is noted where there is no time to make one."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from opentelemetry.util.types import AttributeValue

from shared.telemetry.failure import Failure


def _new_span_id() -> int:
    return random.getrandbits(64) or 1


@dataclass(eq=False, slots=True)
class NotedSpan:
    """A span to be; times in Unix nanoseconds. `parent` is a W3C `traceparent`, `failure` how it ended, if not
    well."""

    name: str
    parent: str
    start_ns: int = field(default_factory=time.time_ns)
    end_ns: int = 0
    attributes: Mapping[str, AttributeValue] | None = None
    failure: Failure | None = None
    span_id: int = field(default_factory=_new_span_id)

    @property
    def traceparent(self) -> str:
        """Its own, for its children; "" if it is not traced."""
        # Version, trace, span and flags: 2, 32, 16 and 2 digits with dashes between them.
        return f"{self.parent[:36]}{self.span_id:016x}{self.parent[52:]}" if self.parent else ""
