"""Workers as the router sees them, links and step costs, and where a request is placed."""

from __future__ import annotations

import random

from shared.policy.placement import Plan, Request, Role, TransferRates, WorkerView, choose
from shared.policy.step_costs import StepCosts

# A step takes 10 ms, and 0.1 ms more for each token.
COSTS = StepCosts([(1, 0.0101), (1001, 0.1101)])
FASTER = StepCosts([(1, 0.00505), (1001, 0.05505)])
BUDGET = 500
# 100 KB of KV a token: 1 ms and 0.01 ms a token on a fast link, 10 ms a token on a slow one.
FAST = TransferRates(1e5, 0.001, 1e10)
SLOW = TransferRates(1e5, 0.001, 1e7)


def step(num_tokens: float) -> float:
    return 0.01 + 0.0001 * num_tokens


def worker(
    name: str,
    role: Role = "both",
    *,
    decoding: int = 0,
    waiting: int = 0,
    backlog: int = 0,
    kv_usage: float = 0.0,
    prefix: int = 0,
    coming: int = 0,
    costs: StepCosts = COSTS,
) -> WorkerView:
    return WorkerView(name, role, costs, BUDGET, 100_000, decoding, waiting, backlog, kv_usage, prefix, coming)


def placed(request: Request, *workers: WorkerView, rates: TransferRates = FAST, seed: int = 0) -> Plan:
    return choose(request, workers, rates, random.Random(seed))
