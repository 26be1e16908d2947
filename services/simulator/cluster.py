"""A simulated service: requests, workers, the links between them, and what happens when."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import NamedTuple

from services.simulator.holders import Holders
from services.simulator.machine import AS_ALONE, Machine
from services.simulator.outcomes import Outcomes
from services.simulator.routing import Affinity, ByPolicy, RoundRobin, Routing, RoutingName
from services.simulator.stream import Hold, Stream
from services.simulator.worker import Worker
from services.simulator.workload import Request
from shared.policy.placement import Role, TransferRates


class TooLarge(ValueError):
    """A request that no worker has room for."""


class Pools(NamedTuple):
    """How many workers prefill, decode, or do both: either some of the first two, or of the third."""

    num_prefill: int = 0
    num_decode: int = 0
    num_both: int = 0

    @property
    def num_workers(self) -> int:
        return sum(self)

    def roles(self) -> list[Role]:
        """Raises ValueError for pools that cannot work."""
        if min(self) < 0 or (self.num_both > 0) == (self.num_decode > 0) or (self.num_both and self.num_prefill):
            raise ValueError("a service needs decode workers, and maybe prefill workers, or else workers that do both")
        counts: dict[Role, int] = {"prefill": self.num_prefill, "decode": self.num_decode, "both": self.num_both}
        return [role for role, number in counts.items() for _ in range(number)]


@dataclass(frozen=True, slots=True)
class Agenda:
    """What will happen, soonest first: a heap of when, number, what and with what.

    `order`: numbers in the order things were put down; the same moment goes by them.
    """

    events: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = field(default_factory=list)
    order: count[int] = field(default_factory=count)


class Service:
    """Requests for one model: where they go, and what happens to them on its workers and on the links between.

    What a link carries leaves its worker one piece after another.
    """

    def __init__(
        self, workers: Sequence[Worker], routing: Routing, machine: Machine, rates: TransferRates, agenda: Agenda
    ) -> None:
        """`machine`: what the workers are like; of their room, the least."""
        self.workers = workers
        self.routing = routing
        self._machine = machine
        self._rates = rates
        self._events = agenda.events
        self._order = agenda.order
        self._arrivals = count()
        self._outcomes = Outcomes()

    def close(self) -> Outcomes:
        """All has ended: how it went. Raises AssertionError if something is left on a worker."""
        for worker in self.workers:
            worker.check_idle()
        self._outcomes.add_workers(self.workers)
        return self._outcomes

    # Events

    def _arrive(self, request: Request) -> None:
        now, machine = request.time, self._machine
        if -(-(request.num_prompt_tokens + request.num_output_tokens) // machine.block_size) > machine.num_blocks:
            raise TooLarge(
                f"the request at {request.time:g} s has {request.num_prompt_tokens} tokens of prompt and "
                f"{request.num_output_tokens} of output: a worker has room for {machine.kv_tokens} together"
            )
        self._outcomes.arrived(now)
        stream = Stream(request, next(self._arrivals), machine.block_size)
        route = self.routing.place(request, now)
        worker = route.decode if route.prefill is None else route.prefill
        held = min(worker.depth(request.prefix_id), stream.prefix_blocks) * machine.block_size
        # A fetch keeps no order: who comes next may be computed before it ends.
        stream.coming_blocks = stream.prefix_blocks if route.source is None else 0
        worker.expect(stream, held + route.fetch_tokens)
        if worker is not route.decode:
            stream.destination = route.decode
            route.decode.expect_hand_over(stream)
        source = route.source
        if source is None:
            self._submit(now, worker, stream)
        else:
            num_blocks = (held + route.fetch_tokens) // machine.block_size
            # Room is made here between two steps, then the blocks are held there, between two of that worker's.
            fetch = partial(self._fetch, source, worker, stream, route.fetch_tokens, num_blocks)
            self._between_steps(now, worker, lambda now: self._between_steps(now, source, fetch))

    def _fetch(
        self, source: Worker, worker: Worker, stream: Stream, num_tokens: int, num_blocks: int, now: float
    ) -> None:
        self._at(self._send(now, source, worker, num_tokens), self._fetched, worker, stream, num_blocks)

    def _fetched(self, now: float, worker: Worker, stream: Stream, num_blocks: int) -> None:
        """The first blocks of the stream's prefix are there."""
        assert stream.request.prefix_id is not None
        self._pause(now, worker)
        worker.blocks.receive(stream.request.prefix_id, num_blocks)
        self._submit(now, worker, stream)

    def _submit(self, now: float, worker: Worker, stream: Stream) -> None:
        self._pause(now, worker)
        worker.submit(stream)
        self._go_on(now, worker)

    def _finish(self, now: float, worker: Worker, version: int) -> None:
        """Steps have ended, unless that was changed meanwhile."""
        if worker.version != version:
            return
        outcome = worker.finish(now)
        for stream in outcome.ended:
            self.routing.ended(stream.request)
            latency = self._machine.latency_seconds
            self._outcomes.ended(stream.order, stream.request, stream.first_token_at + latency, now + latency)
            if stream.destination is not None:
                stream.destination.expect_no_more(stream)
        for act in worker.take_between_steps():
            act(now)
        for stream in outcome.leaving:
            destination, stream.destination = stream.destination, None
            assert destination is not None
            self._pause(now, destination)
            destination.offer(stream, worker)
            self._go_on(now, destination)
        self._go_on(now, worker)

    def _handed_over(self, now: float, source: Worker, destination: Worker, stream: Stream, hold: Hold) -> None:
        for worker in (source, destination):
            self._pause(now, worker)
        source.let_go(stream, stream.hold)
        destination.receive(stream, hold)
        for worker in (source, destination):
            self._go_on(now, worker)

    # Workers

    def _between_steps(self, now: float, worker: Worker, act: Callable[[float], None]) -> None:
        """Has something done when the worker's step under way has ended."""
        self._pause(now, worker)
        if worker.running:
            worker.do_between_steps(act)
        else:
            act(now)

    def _pause(self, now: float, worker: Worker) -> None:
        """Something comes in: a run ends after the step under way."""
        if worker.running and (end := worker.interrupt(now)) is not None:
            self._at(end, self._finish, worker, worker.version)

    def _go_on(self, now: float, worker: Worker) -> None:
        """Begins the next step, if none is under way and there is something to do."""
        if worker.running:
            return
        for pull in worker.pull():
            num_tokens = pull.stream.num_context - pull.num_cached
            done = self._send(now, pull.source, worker, num_tokens)
            self._at(done, self._handed_over, pull.source, worker, pull.stream, pull.hold)
        end = worker.begin(now, self._is_shared())
        if end is not None:
            self._at(end, self._finish, worker, worker.version)

    def _is_shared(self) -> bool:
        """Whether a step that begins now shares a machine with one of another worker."""
        return self._machine.beside_another != AS_ALONE and any(worker.running for worker in self.workers)

    def _send(self, now: float, source: Worker, destination: Worker, num_tokens: int) -> float:
        """When the KV of so many tokens will be there."""
        start = max(now, source.link_free_at)
        source.link_free_at = start + self._rates.seconds(source.worker_id, destination.worker_id, num_tokens)
        return source.link_free_at

    def _at(self, when: float, act: Callable[..., None], *arguments: object) -> None:
        heapq.heappush(self._events, (when, next(self._order), act, arguments))


class Cluster(Service):
    """Workers of one kind under one routing."""

    def __init__(
        self,
        pools: Pools,
        machine: Machine,
        rates: TransferRates,
        routing: RoutingName = RoutingName.POLICY,
        seed: int = 0,
    ) -> None:
        """Raises ValueError for pools that cannot work."""
        holders = Holders()
        workers = [
            Worker(f"{role}-{number}", role, machine, holders.change, seed) for number, role in enumerate(pools.roles())
        ]
        super().__init__(workers, _routing(routing, workers, holders, rates, seed), machine, rates, Agenda())

    def run(self, requests: Iterable[Request]) -> Outcomes:
        """Serves the requests, which come by time, until the last has ended. To be called once. Raises TooLarge."""
        events = self._events
        arrivals = iter(requests)
        following = next(arrivals, None)
        while following is not None or events:
            if following is not None and (not events or following.time <= events[0][0]):
                self._arrive(following)
                following = next(arrivals, None)
            else:
                now, _, act, arguments = heapq.heappop(events)
                act(now, *arguments)
        return self.close()


def _routing(
    name: RoutingName, workers: Sequence[Worker], holders: Holders, rates: TransferRates, seed: int
) -> Routing:
    if name == RoutingName.ROUND_ROBIN:
        return RoundRobin(workers)
    if name == RoutingName.AFFINITY:
        return Affinity(workers)
    by_id = {worker.worker_id: worker for worker in workers}
    return ByPolicy(by_id, holders, rates, random.Random(f"{seed} placement"))
