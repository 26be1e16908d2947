"""Files that are replaced while they are in use: certificates, keys, tokens."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Lock
from typing import Generic, TypeAlias, TypeVar

from shared.settings import StartupError

logger = logging.getLogger(__name__)

Content = TypeVar("Content")
# Of each file when it, or who may read it, was last changed (which no copy can pretend), its size, and which it is.
_Versions: TypeAlias = tuple[tuple[int, int, int], ...]


class WatchedFiles(Generic[Content]):
    """What some files hold together. Any thread may ask for it."""

    def __init__(self, paths: Sequence[Path], parse: Callable[[Sequence[bytes]], Content]) -> None:
        """`parse` gets what each file holds and raises ValueError if that is wrong.

        Raises StartupError if they cannot be read or are wrong now.
        """
        self._paths = paths
        self._parse = parse
        self._lock = Lock()
        self._told = ""
        try:
            self._versions = self._look()
            self._content = self._read()
        except (OSError, ValueError) as error:
            raise StartupError(self._complaint(error)) from error
        self.generation = 0
        """How often they have changed."""

    def current(self) -> Content:
        """What they hold. Files that have become wrong, or half of which was replaced yet, count for what they held."""
        with self._lock:
            try:
                versions = self._look()
                if versions == self._versions:
                    return self._content
                # Looked at before they are read: what is replaced meanwhile is read again.
                self._versions = versions
                self._content = self._read()
            except (OSError, ValueError) as error:
                complaint = self._complaint(error)
                # Once: every connection asks.
                if complaint != self._told:
                    logger.error("%s: what was there before is still in use", complaint)
                self._told = complaint
                return self._content
            self._told = ""
            self.generation += 1
            logger.info("read again", extra={"files": [str(path) for path in self._paths]})
            return self._content

    def _look(self) -> _Versions:
        statuses = [path.stat() for path in self._paths]
        return tuple((status.st_ctime_ns, status.st_size, status.st_ino) for status in statuses)

    def _read(self) -> Content:
        return self._parse([path.read_bytes() for path in self._paths])

    def _complaint(self, error: OSError | ValueError) -> str:
        if isinstance(error, OSError):
            return f"{error.filename} cannot be read: {error.strerror}"
        return f"{', '.join(str(path) for path in self._paths)}: {error}"
