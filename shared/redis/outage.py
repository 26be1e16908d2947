"""One line in the log when Redis is lost and one when it is back, however many calls fail between."""

from __future__ import annotations

import logging


class Outage:
    """Whether Redis is away, as its user sees it. Not thread-safe: one event loop's own."""

    def __init__(self, logger: logging.Logger, meaning: str) -> None:
        """`meaning` tells the reader of the log what goes on without Redis."""
        self._logger = logger
        self._meaning = meaning
        self._away = False

    def begin(self, reason: object) -> None:
        """Redis failed because of `reason`."""
        if not self._away:
            self._away = True
            self._logger.warning("Redis is unavailable (%s): %s", reason, self._meaning)

    def end(self) -> None:
        """Redis answered as it should."""
        if self._away:
            self._away = False
            self._logger.info("Redis is back")
