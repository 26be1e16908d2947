"""All that was measured, and what stands in the report: over the repeats together.

A percentile of each repeat would be one request's luck: the p99 of 120 is the second slowest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tests.benchmarks.pools.prefixes import Sample
from tests.benchmarks.pools.run import Numbers, Run
from tests.benchmarks.pools.simulation import Comparison, compare
from tests.benchmarks.pools.transfer import Rate, TransferCosts

Rows = Mapping[str, Mapping[str, float]]
"""Numbers by name, of each run by its name."""


@dataclass(frozen=True, slots=True)
class Part:
    """A kind of load: what is told of a run, over its repeats, and what of that is simulated."""

    title: str
    numbers_of: Callable[[Sequence[Run]], Mapping[str, float]]
    compared: Numbers


@dataclass(slots=True)
class Results:
    """`runs`: of each part by its letter, those of each repeat."""

    runs: dict[str, list[list[Run]]] = field(default_factory=dict)
    rates: list[Rate] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)

    def add_runs(self, letter: str, runs: list[Run]) -> None:
        """Of one more repeat of the part."""
        self.runs.setdefault(letter, []).append(runs)


def rows_of(part: Part, repeats: Sequence[Sequence[Run]]) -> Rows:
    """Numbers over the repeats, which have the same runs in the same order."""
    return {runs[0].name: part.numbers_of(runs) for runs in zip(*repeats, strict=True)}


def comparisons_of(part: Part, repeats: Sequence[Sequence[Run]], transfer: TransferCosts) -> list[Comparison]:
    """Of each run and number, over the repeats."""
    return [each for runs in zip(*repeats, strict=True) for each in compare(runs, part.compared, transfer)]
