"""What steps cost, from logs of those that were taken.

A step of n tokens is taken to last

    s(n) + a (tokens that those of its prompts attend to) + c (tokens in the contexts of its streams),

s rising and linear between a few sizes, times a factor if it began while another worker of the machine was in one. All
but that factor, which is a mean of ratios, is fitted by least squares of relative errors, nothing below 0.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import fmean
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from services.simulator.costs import CostsError
from services.simulator.machine import AS_ALONE, AS_FORESEEN, ByKind, Machine
from services.simulator.step_log import Step
from shared.policy.step_costs import StepCosts

_SIZES = tuple(1 << power for power in range(15))
# A size is taken if so many steps are closest to it.
_LEAST_STEPS = 8
# What lies between a step and the next one belongs to it, the next waited for it, if it is no longer than this.
_MOST_SECONDS_BETWEEN = 0.02
_MOST_SHARE_BETWEEN = 0.5
# Errors are relative to what was fitted the time before; factors are of costs, and costs without them.
_NUM_TURNS = 6
_NUM_SWEEPS = 2000
_LEAST_SECONDS = 1e-6
# Steps that have one variation in common, and contexts that do not grow: a machine is slower or faster for longer.
_LONGEST_RUN = 4

Array = NDArray[np.float64]


class Fitted(NamedTuple):
    """As in a Machine; `num_steps` were looked at."""

    costs: StepCosts
    attention_seconds: float
    context_seconds: float
    beside_another: ByKind[float]
    variation: ByKind[tuple[float, ...]]
    num_steps: int


def as_logged(machine: Machine, logs: Sequence[Sequence[Step]], *, one_machine: bool = False) -> Machine:
    """The machine with steps that cost, and vary, as these did. Raises as `fit_steps`."""
    fitted = fit_steps(logs, one_machine=one_machine)
    return replace(
        machine,
        costs=fitted.costs,
        attention_seconds=fitted.attention_seconds,
        context_seconds=fitted.context_seconds,
        beside_another=fitted.beside_another,
        variation=fitted.variation,
        longest_run=_LONGEST_RUN,
    )


class _Observed(NamedTuple):
    step: Step
    seconds: float
    beside_another: bool

    @property
    def kind(self) -> str:
        return "prompts" if self.step.prefill_tokens else "streams"


def fit_steps(logs: Sequence[Sequence[Step]], *, one_machine: bool = False) -> Fitted:
    """What steps of workers that are alike cost; each log is one worker's, by time.

    `one_machine`: the workers share one; else none is taken to be disturbed by another. Raises CostsError if there are
    no steps.
    """
    observed = [
        each
        for place, log in enumerate(logs)
        for each in _observe(log, [*logs[:place], *logs[place + 1 :]] if one_machine else [])
    ]
    if not observed:
        raise CostsError("no steps")
    sizes = _sizes([each.step.tokens for each in observed])
    rows = np.array([_row(each.step, sizes) for each in observed])
    # As large as they come, each column counts as much as any other.
    scale = np.maximum(rows.max(axis=0), 1e-300)
    rows /= scale
    factors = AS_ALONE
    expected = np.ones(len(observed))
    for _ in range(_NUM_TURNS):
        alone = np.array([each.seconds / _factor(each, factors) for each in observed])
        found = _least_squares(rows / expected[:, None], alone / expected)
        expected = np.maximum(rows @ found, _LEAST_SECONDS)
        ratios = [each.seconds / seconds for each, seconds in zip(observed, expected.tolist(), strict=True)]
        factors = _factors(observed, ratios)
    found /= scale
    seconds = np.cumsum(found[:-2]).tolist()
    rest = [ratio / _factor(each, factors) for each, ratio in zip(observed, ratios, strict=True)]
    return Fitted(
        StepCosts([(size, max(cost, _LEAST_SECONDS)) for size, cost in zip(sizes, seconds, strict=True)]),
        float(found[-2]),
        float(found[-1]),
        factors,
        ByKind(*(_of_kind(observed, rest, kind) or (1.0,) for kind in AS_FORESEEN._fields)),
        len(observed),
    )


def _observe(log: Sequence[Step], others: Sequence[Sequence[Step]]) -> list[_Observed]:
    starts = [[step.time for step in other] for other in others]

    def beside_another(time: float) -> bool:
        return any(_under_way(other, began, time) for other, began in zip(others, starts, strict=True))

    seconds = [step.seconds for step in log]
    for place, (step, following) in enumerate(pairwise(log)):
        between = following.time - step.end
        if 0 < between <= min(_MOST_SECONDS_BETWEEN, _MOST_SHARE_BETWEEN * step.seconds):
            seconds[place] += between
    return [_Observed(step, taken, beside_another(step.time)) for step, taken in zip(log, seconds, strict=True)]


def _under_way(log: Sequence[Step], starts: Sequence[float], time: float) -> bool:
    """Whether the worker was in a step then."""
    place = bisect_right(starts, time) - 1
    return place >= 0 and log[place].end > time


def _sizes(tokens: Sequence[int]) -> list[int]:
    """Sizes that there are enough steps of; the least and the largest in any case."""
    counts = Counter(min(_SIZES, key=lambda size: abs(math.log(size / number))) for number in tokens)
    return sorted(size for size, count in counts.items() if count >= _LEAST_STEPS or size in (min(counts), max(counts)))


def _row(step: Step, sizes: Sequence[int]) -> list[float]:
    """What the step has of each unknown: costs of the first size, what each further one adds, attention, context."""
    beyond = max(1.0, step.tokens / sizes[-1])
    rises = [
        beyond * min(1.0, max(0.0, (step.tokens - before) / (after - before))) for before, after in pairwise(sizes)
    ]
    return [beyond, *rises, step.prefill_attended, step.context_tokens]


def _factor(each: _Observed, factors: ByKind[float]) -> float:
    if not each.beside_another:
        return 1.0
    return factors.prompts if each.step.prefill_tokens else factors.streams


def _factors(observed: Sequence[_Observed], ratios: Sequence[float]) -> ByKind[float]:
    """Those of steps beside another. Nobody is taken to be faster for that."""
    beside = [(each, ratio) for each, ratio in zip(observed, ratios, strict=True) if each.beside_another]
    steps, those = [each for each, _ in beside], [ratio for _, ratio in beside]
    return ByKind(*(max(1.0, fmean(_of_kind(steps, those, kind) or (1.0,))) for kind in AS_ALONE._fields))


def _of_kind(observed: Sequence[_Observed], ratios: Sequence[float], kind: str) -> tuple[float, ...]:
    return tuple(ratio for each, ratio in zip(observed, ratios, strict=True) if each.kind == kind)


def _least_squares(rows: Array, values: Array) -> Array:
    """x, nothing below 0, with the least squares of rows x - values: one unknown after the other, again and again
    (coordinate descent, which ends at the only minimum there is)."""
    products, right = rows.T @ rows, rows.T @ values
    found = np.zeros(rows.shape[1])
    for _ in range(_NUM_SWEEPS):
        before = found.copy()
        for place, weight in enumerate(np.diag(products)):
            if weight > 0:
                found[place] = max(0.0, found[place] + (right[place] - products[place] @ found) / weight)
        if np.allclose(found, before, rtol=1e-9, atol=0.0):
            break
    return found
