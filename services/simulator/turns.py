"""Several models on one simulated worker: whose step is next, and what the router sees of it."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping

from services.simulator.cluster import Agenda, Service
from services.simulator.holders import Holders
from services.simulator.machine import Machine
from services.simulator.routing import ByPolicy
from services.simulator.worker import Worker
from services.simulator.workload import Request
from shared.policy.placement import TransferRates, WorkerView
from shared.policy.step_costs import StepCosts


class Turns:
    """One worker with several models, each as a `Worker` of its own: a part, with its blocks and its queue.

    One part at a time takes a step. Those that have work take turns, a step each (round robin); one that is alone goes
    on and on, until another one has work.
    """

    def __init__(self) -> None:
        self.link_free_at = 0.0
        self._parts: list[tuple[SharingService, Worker]] = []
        self._next = 0

    def join(self, service: SharingService, part: Worker) -> None:
        self._parts.append((service, part))

    def others(self, part: Worker) -> list[Worker]:
        """Those of other models, if they have streams."""
        return [each for _, each in self._parts if each is not part and each.num_decoding + each.num_waiting]

    def pause(self, now: float) -> None:
        """Something comes in for a part: who takes steps ends with the one under way."""
        for service, part in self._parts:
            service.pause_part(now, part)

    def go_on(self, now: float) -> None:
        """Has the next part that has work begin, unless one is taking a step."""
        if any(part.running for _, part in self._parts):
            return
        for place in range(self._next, self._next + len(self._parts)):
            service, part = self._parts[place % len(self._parts)]
            part.in_turns = bool(self.others(part))
            service.go_on_part(now, part)
            if part.running:
                self._next = (place + 1) % len(self._parts)
                return


class SharingService(Service):
    """A model's requests, on workers that it shares with other models."""

    def __init__(
        self,
        name: str,
        machines: Mapping[str, Machine],
        turns: Mapping[str, Turns],
        rates: TransferRates,
        agenda: Agenda,
        seed: int,
    ) -> None:
        """`machines`: what each worker that holds the model is to it; `turns`: those of all workers, which it joins."""
        holders = Holders()
        parts = {each: Worker(each, "both", machine, holders.change) for each, machine in machines.items()}
        routing = _BySharedPolicy(parts, turns, holders, rates, random.Random(f"{seed} placement {name}"))
        least = min(machines.values(), key=lambda machine: machine.num_blocks)
        super().__init__(list(parts.values()), routing, least, rates, agenda)
        self._turns = turns
        for each, part in parts.items():
            turns[each].join(self, part)

    def expect(self, requests: Iterable[Request]) -> None:
        """They will arrive, by time."""
        self._to_come = iter(requests)
        self._put_down_next()

    def pause_part(self, now: float, part: Worker) -> None:
        """The part's steps end with the one under way, if there is one."""
        super()._pause(now, part)

    def go_on_part(self, now: float, part: Worker) -> None:
        """It is the part's turn: it begins, if there is something to do."""
        super()._go_on(now, part)

    def _put_down_next(self) -> None:
        request = next(self._to_come, None)
        if request is not None:
            self._at(request.time, self._arrive_in_turn, request)

    def _arrive_in_turn(self, now: float, request: Request) -> None:
        self._put_down_next()
        self._arrive(request)

    def _pause(self, now: float, worker: Worker) -> None:
        self._turns[worker.worker_id].pause(now)

    def _go_on(self, now: float, worker: Worker) -> None:
        self._turns[worker.worker_id].go_on(now)

    def _send(self, now: float, source: Worker, destination: Worker, num_tokens: int) -> float:
        # The models on a worker share its link.
        turns = self._turns[source.worker_id]
        source.link_free_at = turns.link_free_at
        turns.link_free_at = super()._send(now, source, destination, num_tokens)
        return turns.link_free_at


class _BySharedPolicy(ByPolicy):
    """By predicted cost, with what a router would know of the other models on a worker.

    Between two steps of ours each other model that has streams there takes one of its own, and our step delays its
    streams as it does ours. So to the policy these streams are among those that decode, and a step takes as long as
    one of each model together: the costs of the others, then, once it has more tokens than there are other streams,
    ours.
    """

    def __init__(
        self,
        workers: Mapping[str, Worker],
        turns: Mapping[str, Turns],
        holders: Holders,
        rates: TransferRates,
        rng: random.Random,
    ) -> None:
        super().__init__(workers, holders, rates, rng)
        self._turns = turns

    def view(self, worker: Worker, request: Request, now: float) -> WorkerView:
        alone = super().view(worker, request, now)
        others = self._turns[worker.worker_id].others(worker)
        if not others:
            return alone
        num_others = sum(each.num_decoding + each.num_waiting for each in others)
        num_steps = self.num_output_tokens + (alone.backlog_tokens + request.num_prompt_tokens) / alone.max_batch_tokens
        return alone._replace(
            costs=_InTurns(alone.costs, num_others, sum(_mean_step(each, num_steps) for each in others)),
            max_batch_tokens=alone.max_batch_tokens + num_others,
            num_decoding=alone.num_decoding + num_others,
        )


class _InTurns(StepCosts):
    """A step of each model on a worker, ours with the tokens beyond `num_others`."""

    def __init__(self, own: StepCosts, num_others: int, others_seconds: float) -> None:
        self._own = own
        self._num_others = num_others
        self._others_seconds = others_seconds

    def seconds(self, num_tokens: float) -> float:
        num_own = num_tokens - self._num_others
        return self._others_seconds + (self._own.seconds(num_own) if num_own > 0 else 0.0)


def _mean_step(part: Worker, num_steps: float) -> float:
    """Seconds of its next so many steps, on average: full as long as its prompts last, then its streams alone."""
    costs, num_streams = part.machine.costs, part.num_decoding + part.num_waiting
    num_chunk = max(1, part.machine.max_batch_tokens - num_streams)
    share = min(1.0, part.backlog_tokens / num_chunk / num_steps)
    return (1 - share) * costs.seconds(num_streams) + share * costs.seconds(num_streams + num_chunk)
