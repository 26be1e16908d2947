"""How a worker that cannot serve any more ends."""

from __future__ import annotations

EXIT_FAILED = 70
"""Exit status of a worker that ended itself (EX_SOFTWARE of sysexits.h): its supervisor starts it again."""


class WorkerFailed(Exception):
    """The worker's engine broke or hangs; what happened is in the log."""
