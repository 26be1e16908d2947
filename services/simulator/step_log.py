"""Steps of a worker as it wrote them down: what each took."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from services.simulator.costs import CostsError

# More than anything there is counted comes to.
_MOST = 1e15


class Step(NamedTuple):
    """A step, by the names of its line in the log of a target worker."""

    time: float
    seconds: float
    tokens: int
    prefill_tokens: int
    sequences: int
    prefill_attended: int
    context_tokens: int

    @property
    def end(self) -> float:
        return self.time + self.seconds


def read_step_log(path: Path) -> list[Step]:
    """The steps of one worker, by their time; at least one. Raises CostsError for a file that is no such log."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise CostsError(f"{path}: {error}") from error
    steps = sorted(_step(path, number, line) for number, line in enumerate(lines, 1) if line.strip())
    if not steps:
        raise CostsError(f"{path}: no steps")
    return steps


def _step(path: Path, number: int, line: str) -> Step:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise CostsError(f"{path}, line {number}: not JSON: {error}") from error
    if not isinstance(values, dict):
        raise CostsError(f"{path}, line {number}: not an object")
    numbers = []
    for name in Step._fields:
        value = values.get(name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= _MOST:
            raise CostsError(f"{path}, line {number}: field {name} must be a number from 0 to {_MOST:g}, not {value!r}")
        numbers.append(value)
    step = Step(*numbers)  # type: ignore[arg-type] # numbers, as was just seen
    if step.tokens < 1:
        raise CostsError(f"{path}, line {number}: field tokens must be at least 1, not {step.tokens!r}")
    if step.seconds <= 0:
        raise CostsError(f"{path}, line {number}: field seconds must be more than 0, not {step.seconds!r}")
    return step
