"""What steps of simulated workers take: two numbers, or a file of measurements."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

from shared.policy.step_costs import StepCosts


class CostsError(ValueError):
    """Step costs that cannot be read; the message is one line."""


def linear_costs(step_seconds: float, tokens_per_second: float, max_batch_tokens: int) -> StepCosts:
    """A step of n tokens takes step_seconds + n / tokens_per_second: reading the weights, then arithmetic."""
    sizes = sorted({1, max_batch_tokens})
    return StepCosts([(size, step_seconds + size / tokens_per_second) for size in sizes])


def read_step_costs(path: Path) -> StepCosts:
    """Measured costs from a file of JSON: [[tokens, seconds], ...], by increasing tokens. Raises CostsError."""
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CostsError(f"{path}: {error}") from error
    if not isinstance(entries, list) or not entries:
        raise CostsError(f"{path}: must be a list of [tokens, seconds], with one entry at least")
    measured = []
    for place, entry in enumerate(entries, 1):
        match entry:
            case [int(size), int() | float() as seconds] if size > 0 and 0 < seconds < float("inf"):
                measured.append((size, float(seconds)))
            case _:
                raise CostsError(f"{path}, entry {place}: must be [tokens, seconds], both above 0, not {entry!r}")
    for place, ((before, _), (after, _)) in enumerate(pairwise(measured), 2):
        if after <= before:
            raise CostsError(f"{path}, entry {place}: {after} tokens do not come after {before}")
    return StepCosts(measured)
