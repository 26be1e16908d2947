"""A trace that was served: by whom, and what was seen of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from services.simulator.outcomes import Outcomes
from services.simulator.routing import RoutingName
from services.simulator.workload import Request
from tests.benchmarks.pools.observed import Observed
from tests.benchmarks.pools.setup import Setup
from tests.benchmarks.pools.trace import Served, outcomes_of

Numbers = Mapping[str, Callable[[Sequence[Outcomes]], float]]
"""What is compared, by name, over all repeats together: seconds, or requests a second."""


@dataclass(frozen=True, slots=True)
class Run:
    """A trace, in order of arrival, served by a setup under a routing."""

    name: str
    setup: Setup
    served: tuple[Served, ...]
    observed: Observed
    routing: RoutingName = RoutingName.POLICY

    @property
    def requests(self) -> list[Request]:
        return [each.request for each in self.served]

    @property
    def outcomes(self) -> Outcomes:
        return outcomes_of(self.served)
