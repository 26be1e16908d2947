"""Several models on shared workers: what a placement of them does with their loads."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from services.simulator.cluster import Agenda
from services.simulator.machine import Machine
from services.simulator.model import Fleet, Model, Placement
from services.simulator.outcomes import Outcomes
from services.simulator.turns import SharingService, Turns
from shared.policy.placement import TransferRates


def simulate_models(models: Sequence[Model], placement: Placement, fleet: Fleet, seed: int) -> list[Outcomes]:
    """How each model's requests went, in the order of the models; those of a model without a worker are not served.

    A request goes to one of the workers that hold its model, by the router's policy. Raises ValueError for a placement
    that the workers have no room for.
    """
    agenda = Agenda()
    turns = {_name(number): Turns() for number in range(len(placement))}
    services: dict[int, SharingService] = {}
    for number, model in enumerate(models):
        machines = {
            _name(worker): _machine(fleet, models, number, placed)
            for worker, placed in enumerate(placement)
            if number in placed
        }
        if machines:
            rates = TransferRates(model.kv_bytes_per_token, *fleet.link)
            services[number] = SharingService(model.name, machines, turns, rates, agenda, seed)
    for number, service in services.items():
        service.expect(models[number].requests)
    while agenda.events:
        now, _, act, arguments = heapq.heappop(agenda.events)
        act(now, *arguments)
    return [services[number].close() if number in services else Outcomes() for number in range(len(models))]


def _machine(fleet: Fleet, models: Sequence[Model], number: int, placed: Sequence[int]) -> Machine:
    machine = fleet.machine(models[number], [models[other] for other in placed if other != number])
    if machine is None:
        names = ", ".join(models[each].name for each in placed)
        raise ValueError(f"a worker of {fleet.worker_gib:g} GiB has no room for {names} together")
    return machine


def _name(worker: int) -> str:
    return f"worker-{worker}"
