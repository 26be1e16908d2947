"""Whether a worker that failed is to be tried again: a circuit breaker."""

from __future__ import annotations

import time
from collections.abc import Callable

# Requests in a row that a worker failed.
_MAX_FAILURES = 3
_MIN_BACKOFF_SECONDS = 1.0
_MAX_BACKOFF_SECONDS = 30.0


class CircuitBreaker:
    """Closed while a worker does its work; open once it failed several requests in a row; half-open after a while.

    Half-open, one request at a time is let through, the probe: its success closes the breaker, its failure opens
    it for twice as long as before, up to 30 s. (M. Nygard, Release It!, 2007.)
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._num_failures = 0
        self._backoff = _MIN_BACKOFF_SECONDS
        # When the latest opening turns half-open; None: closed.
        self._half_open_at: float | None = None
        self._probing = False

    @property
    def allows(self) -> bool:
        """Whether a request may go to the worker."""
        return self._half_open_at is None or (self._half_open and not self._probing)

    def begin(self) -> bool:
        """A request goes to the worker, allowed or for want of another; whether it is a probe.

        A probe must come to an end: by `succeeded`, `failed` or `abandon_probe`.
        """
        probe = self._half_open and not self._probing
        self._probing = self._probing or probe
        return probe

    def succeeded(self) -> None:
        """A request was served."""
        self._num_failures = 0
        self._backoff = _MIN_BACKOFF_SECONDS
        self._half_open_at = None
        self._probing = False

    def failed(self) -> None:
        """A request was not."""
        self._num_failures += 1
        closed = self._half_open_at is None
        if self._num_failures >= _MAX_FAILURES if closed else self._half_open:
            self.trip()

    def trip(self) -> None:
        """Opens it, however few have failed."""
        if self._half_open:
            self._backoff = min(2 * self._backoff, _MAX_BACKOFF_SECONDS)
        self._half_open_at = self._clock() + self._backoff
        self._probing = False

    def abandon_probe(self) -> None:
        """The probe ended without telling: its client left."""
        self._probing = False

    @property
    def _half_open(self) -> bool:
        return self._half_open_at is not None and self._clock() >= self._half_open_at
