"""Models that share simulated workers, and what these have room for."""

from __future__ import annotations

from collections.abc import Sequence

from services.simulator.costs import linear_costs
from services.simulator.model import Fleet, Link, Model
from services.simulator.report import Objectives
from services.simulator.workload import Lengths, Request, SharedPrefixes, Workload

KV_BYTES = 131_072.0
FLEET = Fleet(
    num_workers=2, worker_gib=80.0, max_batch_tokens=512, max_sequences=128, block_size=16, link=Link(0.002, 1e9)
)


def a_model(name: str, requests: Sequence[Request], *, weights_gib: float = 16.0, slow: bool = False) -> Model:
    costs = linear_costs(0.03, 10_000, 512) if slow else linear_costs(0.01, 25_000, 512)
    return Model(name, costs, weights_gib, KV_BYTES, requests, Objectives(1.0, 0.1))


def busy(num_requests: int, rate: float, seed: str, burstiness: float = 2.0) -> list[Request]:
    prefixes = SharedPrefixes(5, 200, share=0.6)
    return list(Workload(rate, num_requests, Lengths(200, 0.8), Lengths(40, 0.8), burstiness, prefixes).requests(seed))
