"""How simulated requests went: what was measured, and its percentiles."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from services.simulator.worker import Worker
from services.simulator.workload import Request


@dataclass(frozen=True, slots=True)
class WorkerOutcome:
    """What a worker did: `busy_seconds` in steps."""

    worker_id: str
    role: str
    busy_seconds: float
    num_preemptions: int


@dataclass(slots=True)
class Outcomes:
    """Of each request, in order of their ends, TTFT and TPOT in seconds (NaN with one token of output).

    `order`: the place of each by arrival, from 0.
    `inter_token`: how many tokens came so many seconds after the one before, exactly, over all requests.
    """

    ttft: array[float] = field(default_factory=lambda: array("d"))
    tpot: array[float] = field(default_factory=lambda: array("d"))
    order: array[int] = field(default_factory=lambda: array("q"))
    inter_token: Counter[float] = field(default_factory=Counter)
    workers: list[WorkerOutcome] = field(default_factory=list)
    num_output_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    _first_arrival: float = math.inf
    _last_end: float = -math.inf

    def arrived(self, now: float) -> None:
        """A request was sent."""
        self._first_arrival = min(self._first_arrival, now)

    def ended(self, order: int, request: Request, first_token_at: float, now: float) -> None:
        """The request had its last token now."""
        self._last_end = now
        self.num_output_tokens += request.num_output_tokens
        self.order.append(order)
        self.ttft.append(first_token_at - request.time)
        num_more = request.num_output_tokens - 1
        self.tpot.append((now - first_token_at) / num_more if num_more else math.nan)

    def add_workers(self, workers: Iterable[Worker]) -> None:
        """Everything has ended."""
        for worker in workers:
            self.workers.append(
                WorkerOutcome(worker.worker_id, worker.role, worker.busy_seconds, worker.num_preemptions)
            )
            self.prompt_tokens += worker.prompt_tokens
            self.cached_tokens += worker.cached_tokens
            self.inter_token.update(worker.gaps)
        # Without those that there are none of.
        self.inter_token = +self.inter_token

    @property
    def num_requests(self) -> int:
        return len(self.ttft)

    @property
    def seconds(self) -> float:
        """From the first arrival to the last token."""
        return max(0.0, self._last_end - self._first_arrival)

    def num_good(self, slo_ttft: float, slo_tpot: float) -> int:
        """Requests that met both; TPOT does not matter to those with one token."""
        return sum(ttft <= slo_ttft and not tpot > slo_tpot for ttft, tpot in zip(self.ttft, self.tpot, strict=True))


def quantiles(values: Iterable[float], shares: Sequence[float]) -> list[float]:
    """For each share the least of the values that so many are not above; NaN of none. NaN among them does not count."""
    ordered = sorted(value for value in values if not math.isnan(value))
    last = len(ordered) - 1
    return [
        ordered[min(last, max(0, math.ceil(share * len(ordered)) - 1))] if ordered else math.nan for share in shares
    ]


def weighted_quantiles(weights: Mapping[float, int], shares: Sequence[float]) -> list[float]:
    """The same of values that come so many times each."""
    ordered = sorted(weights)
    running = list(accumulate(weights[value] for value in ordered))
    found = []
    for share in shares:
        place = next((place for place, total in enumerate(running) if total >= share * running[-1]), None)
        found.append(math.nan if place is None else ordered[place])
    return found
