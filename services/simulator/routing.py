"""Where simulated requests go: the router's own policy, and baselines to compare it with."""

from __future__ import annotations

import random
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from itertools import cycle
from typing import NamedTuple

from services.simulator.holders import Holders
from services.simulator.worker import Worker
from services.simulator.workload import Request
from shared.policy import placement
from shared.policy.placement import TransferRates, WorkerView, candidates, choose

# Depths of a prefix looked at: as many as holders.
_NUM_LEVELS = 3
# Tokens of output before any request has ended, and how much an ended one counts.
_PRIOR_OUTPUT_TOKENS = 128.0
_OUTPUT_WEIGHT = 0.02


class Route(NamedTuple):
    """As a Plan of `shared.policy.placement`: the workers that decode and prefill, and what is fetched first."""

    decode: Worker
    prefill: Worker | None = None
    source: Worker | None = None
    fetch_tokens: int = 0


class Routing(ABC):
    """Chooses the workers of each request."""

    @abstractmethod
    def place(self, request: Request, now: float) -> Route:
        """Where the request that arrives now goes."""

    def ended(self, request: Request) -> None:  # noqa: B027 - most do not care
        """The request has had its last token."""


class RoutingName(StrEnum):
    """Ways to place requests."""

    POLICY = "policy"
    ROUND_ROBIN = "round-robin"
    AFFINITY = "affinity"


class ByPolicy(Routing):
    """By predicted cost, with what the router would know. `num_views`: workers looked at, all requests together."""

    def __init__(
        self, workers: Mapping[str, Worker], holders: Holders, rates: TransferRates, rng: random.Random
    ) -> None:
        self.num_views = 0
        # Of requests, expected.
        self.num_output_tokens = _PRIOR_OUTPUT_TOKENS
        self._workers = workers
        self._holders = holders
        self._rates = rates
        self._rng = rng
        roles: dict[str, list[str]] = {}
        for worker in workers.values():
            roles.setdefault(worker.role, []).append(worker.worker_id)
        self._pools = list(roles.values())

    def place(self, request: Request, now: float) -> Route:
        workers = self._workers
        holders: Iterator[Sequence[str]] = iter(())
        if request.prefix_id is not None:
            holders = self._holders.deepest(request.prefix_id, _NUM_LEVELS)
        views = [self.view(workers[each], request, now) for each in candidates(holders, self._pools, self._rng)]
        self.num_views += len(views)
        wanted = placement.Request(request.num_prompt_tokens, self.num_output_tokens)
        plan = choose(wanted, views, self._rates, self._rng)
        return Route(
            workers[plan.decode],
            workers[plan.prefill] if plan.prefill is not None else None,
            workers[plan.fetch] if plan.fetch is not None else None,
            plan.fetch_tokens,
        )

    def view(self, worker: Worker, request: Request, now: float) -> WorkerView:
        """What the router would know of the worker."""
        block_size = worker.machine.block_size
        most = request.prefix_tokens // block_size
        num_prefix_blocks = min(worker.blocks.depth(request.prefix_id), most)
        num_coming_blocks = min(worker.coming.depth(request.prefix_id), most)
        return WorkerView(
            worker.worker_id,
            worker.role,
            worker.machine.costs,
            worker.machine.max_batch_tokens,
            worker.machine.kv_tokens,
            worker.num_decoding,
            worker.num_waiting,
            worker.backlog_tokens,
            worker.kv_usage(now),
            num_prefix_blocks * block_size,
            num_coming_blocks * block_size,
        )

    def ended(self, request: Request) -> None:
        self.num_output_tokens += _OUTPUT_WEIGHT * (request.num_output_tokens - self.num_output_tokens)


class RoundRobin(Routing):
    """Everybody in turn; with prefill workers, these prefill."""

    def __init__(self, workers: Sequence[Worker]) -> None:
        self._decoders = cycle([worker for worker in workers if worker.role != "prefill"])
        self._prefillers = cycle([worker for worker in workers if worker.role == "prefill"])

    def place(self, request: Request, now: float) -> Route:
        return Route(next(self._decoders), next(self._prefillers, None))


class Affinity(RoundRobin):
    """Every prefix has its worker, by its name; what has none goes to everybody in turn."""

    def __init__(self, workers: Sequence[Worker]) -> None:
        super().__init__(workers)
        prefillers = [worker for worker in workers if worker.role == "prefill"]
        self._separate = bool(prefillers)
        self._homes = prefillers or list(workers)

    def place(self, request: Request, now: float) -> Route:
        route = super().place(request, now)
        if request.prefix_id is None:
            return route
        home = self._homes[zlib.crc32(request.prefix_id.encode()) % len(self._homes)]
        return route._replace(prefill=home) if self._separate else Route(home)
