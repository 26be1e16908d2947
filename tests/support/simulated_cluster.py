"""Simulated workers whose steps cost what closed forms can say, and what they are to serve."""

from __future__ import annotations

from pathlib import Path

from services.simulator.cluster import Cluster, Pools
from services.simulator.costs import linear_costs
from services.simulator.machine import Machine
from services.simulator.outcomes import Outcomes
from services.simulator.workload import Lengths, Request, SharedPrefixes, Workload
from shared.policy.placement import TransferRates

# A step takes 10 ms, and 0.04 ms more for each token.
COSTS = linear_costs(0.01, 25_000, 512)
MACHINE = Machine(COSTS, max_batch_tokens=512, max_sequences=128, num_blocks=4000, block_size=16)
RATES = TransferRates(1e5, 0.002, 1e9)
ALONE = Pools(num_both=1)


def step(num_tokens: int) -> float:
    return 0.01 + num_tokens / 25_000


def run(requests: list[Request], pools: Pools = ALONE, machine: Machine = MACHINE, **options: object) -> Outcomes:
    return Cluster(pools, machine, RATES, **options).run(requests)  # type: ignore[arg-type]


def counts(outcomes: Outcomes) -> dict[float, int]:
    """Tokens by the seconds since the one before, as far as these can be told apart."""
    return {round(seconds, 9): count for seconds, count in outcomes.inter_token.items()}


def busy_workload(num_requests: int = 400, rate: float = 30.0) -> Workload:
    prefixes = SharedPrefixes(10, 200, share=0.7)
    return Workload(rate, num_requests, Lengths(200, 0.8), Lengths(60, 0.8), 1.5, prefixes)


POOLS = [Pools(num_both=3), Pools(2, 2), Pools(1, 3), Pools(num_decode=3)]


def written(folder: Path, text: str, name: str = "trace.jsonl") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path
