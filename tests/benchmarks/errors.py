"""What ends a benchmark before its report."""

from __future__ import annotations


class BenchmarkError(Exception):
    """A measurement did not come about, or is not what it says it is; the message is one line."""
