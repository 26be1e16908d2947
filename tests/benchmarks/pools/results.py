"""All that was measured, and what stands in the report: medians over the repeats."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from tests.benchmarks.pools.prefixes import Sample
from tests.benchmarks.pools.run import Numbers, Run
from tests.benchmarks.pools.simulation import Comparison, compare
from tests.benchmarks.pools.transfer import Rate, TransferCosts

Rows = Mapping[str, Mapping[str, float]]
"""Numbers by name, of each run by its name."""


@dataclass(frozen=True, slots=True)
class Part:
    """A kind of load: what is told of a run, and what of that is simulated."""

    title: str
    numbers_of: Callable[[Run], Mapping[str, float]]
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
    """Medians over the repeats, which have the same runs."""
    found = [{run.name: part.numbers_of(run) for run in runs} for runs in repeats]
    return {
        name: {number: median(each[name][number] for each in found) for number in numbers}
        for name, numbers in found[0].items()
    }


def comparisons_of(part: Part, repeats: Sequence[Sequence[Run]], transfer: TransferCosts) -> list[Comparison]:
    """Of each run and number: the repeat with the median ratio of what was simulated to what was measured."""
    found: dict[tuple[str, str], list[Comparison]] = {}
    for runs in repeats:
        for run in runs:
            for each in compare(run, part.compared, transfer):
                found.setdefault((each.run, each.what), []).append(each)
    return [sorted(several, key=lambda each: each.ratio)[len(several) // 2] for several in found.values()]
