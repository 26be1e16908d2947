"""The `outrider` command with a target worker whose steps go wrong when a test says so.

Run in its place (`python -m tests.support.faulty_target target ...`). While the file that FAULT_FILE names exists,
every step does what it says: `fail` or `hang`. A new process takes the file away first: a restart mends it.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

from services.cli.main import main

FAULT_FILE = "OUTRIDER_TEST_FAULT_FILE"
FAIL, HANG = "fail", "hang"


def hang_for_ever() -> None:
    threading.Event().wait()


def break_steps(file: Path) -> None:
    """Puts the fault into the engine's runner: behind warm-up, which runs no plan."""
    # Imported here: torch must not be loaded before the command has prepared the worker's environment.
    from shared.engine.runner import ModelRunner
    from shared.worker import watchdog

    run = ModelRunner.run

    def faulty(self: ModelRunner, plan: Any) -> Any:
        if file.exists():
            if file.read_text() == HANG:
                hang_for_ever()
            raise RuntimeError("a kernel is broken")
        return run(self, plan)

    ModelRunner.run = faulty  # type: ignore[method-assign]
    watchdog._MIN_LIMIT_SECONDS, watchdog._LIMIT_FACTOR = 3.0, 10.0


if __name__ == "__main__":
    fault_file = Path(os.environ[FAULT_FILE])
    fault_file.unlink(missing_ok=True)
    break_steps(fault_file)
    main()
