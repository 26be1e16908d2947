"""What a worker's steps took, one by one, for those who would simulate it."""

from __future__ import annotations

import errno
import json
import logging
import os
from pathlib import Path

from shared.engine.engine import StepOutcome
from shared.settings import StartupError

logger = logging.getLogger(__name__)


class StepLog:
    """A file with a line of JSON for each step, added to what is in it. `services.simulator.step_log` reads it.

    `time`: when it began, Unix seconds; `seconds`: what it took; `tokens` in it, `prefill_tokens` of these of prompts;
    `sequences`; `prefill_attended`: tokens that those of prompts attend to, one after another; `context_tokens`: in the
    contexts of all other sequences.
    A file that cannot be written to any more is given up with a warning, no half line left in it: steps go on.
    """

    def __init__(self, path: Path) -> None:
        """Raises StartupError if the file cannot be opened, or is one that a write to may wait for somebody."""
        if path.exists() and not path.is_file() and not path.is_dir():
            raise StartupError(f"step_log {str(path)!r} is no regular file: steps would wait for whoever reads it")
        try:
            # Whole lines, each at once: whoever reads meanwhile, or after a crash, finds no half ones.
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise StartupError(f"step_log {str(path)!r} cannot be written: {error.strerror}") from error

    def close(self) -> None:
        """Nothing is written from now on. Safe to call again; not while `write` may be running."""
        self._file.close()

    def write(self, outcome: StepOutcome) -> None:
        """Adds a step's line; on the engine's thread."""
        if self._file.closed:
            return
        prefill_attended, context_tokens = outcome.num_attended
        line = {
            "time": round(outcome.began_ns / 1e9, 6),
            "seconds": round(outcome.seconds, 6),
            "tokens": outcome.num_tokens,
            "prefill_tokens": outcome.num_prefill_tokens,
            "sequences": outcome.num_sequences,
            "prefill_attended": prefill_attended,
            "context_tokens": context_tokens,
        }
        try:
            self._write(json.dumps(line).encode() + b"\n")
        except OSError as error:
            logger.warning("step_log is given up: it cannot be written", extra={"reason": error.strerror})
            self.close()

    def _write(self, line: bytes) -> None:
        num_written = self._file.write(line)
        if num_written < len(line):
            # There was room for so much only.
            self._file.truncate(self._file.tell() - num_written)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
