"""Several models on shared simulated workers: turns, conservation, what the router sees, links and memory."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from services.simulator.cluster import Agenda, Cluster, Pools, Service
from services.simulator.model import GIB, Fleet, Model, Placement
from services.simulator.outcomes import Outcomes
from services.simulator.report import summarise
from services.simulator.routing import ByPolicy
from services.simulator.sharing import simulate_models
from services.simulator.stream import Stream
from services.simulator.turns import SharingService, Turns
from services.simulator.worker import Worker
from services.simulator.workload import Request
from shared.policy.placement import TransferRates, WorkerView
from tests.support.simulated_models import FLEET, KV_BYTES, a_model, busy

TOGETHER: Placement = ((0, 1),)


def quick(num_tokens: int) -> float:
    return 0.01 + num_tokens / 25_000


def slow(num_tokens: int) -> float:
    return 0.03 + num_tokens / 10_000


def pair(first: list[Request], second: list[Request]) -> list[Model]:
    return [a_model("quick", first), a_model("slow", second, slow=True)]


def run(
    models: Sequence[Model], placement: Placement = TOGETHER, fleet: Fleet = FLEET, seed: int = 0
) -> list[Outcomes]:
    return simulate_models(models, placement, fleet, seed)


def gaps(outcomes: Outcomes) -> list[float]:
    return sorted(outcomes.inter_token.elements())


# Turns


def test_two_models_take_turns_a_step_each() -> None:
    quicks, slows = run(pair([Request(0.0, 100, 4)], [Request(0.0, 50, 3)]))
    # Prompts of 100 and 50, then a token each in turn: q s q s, and a last q.
    assert quicks.ttft[0] == pytest.approx(quick(100))
    assert slows.ttft[0] == pytest.approx(quick(100) + slow(50))
    assert quicks.tpot[0] == pytest.approx((slow(50) + 3 * quick(1) + 2 * slow(1)) / 3)
    assert slows.tpot[0] == pytest.approx(quick(1) + slow(1))
    assert gaps(quicks) == pytest.approx([slow(1) + quick(1)] * 2 + [slow(50) + quick(1)])
    assert gaps(slows) == pytest.approx([quick(1) + slow(1)] * 2)
    assert [each.workers[0].busy_seconds for each in (quicks, slows)] == pytest.approx(
        [quick(100) + 3 * quick(1), slow(50) + 2 * slow(1)]
    )


def test_who_comes_waits_for_the_step_under_way_and_no_longer() -> None:
    quicks, slows = run(pair([Request(0.0, 100, 1000)], [Request(0.105, 50, 2)]))
    # The first is alone until then, its next token's step is under way.
    rest = (quick(100) - 0.105) % quick(1)
    assert 0 < rest < quick(1)
    assert slows.ttft[0] == pytest.approx(rest + slow(50))
    assert slows.tpot[0] == pytest.approx(quick(1) + slow(1))
    # Two of its tokens wait for a step of the other, all others only for their own.
    assert gaps(quicks) == pytest.approx([quick(1)] * 997 + [quick(1) + slow(1), quick(1) + slow(50)])


def test_turns_go_round_all_that_have_work() -> None:
    models = [a_model(name, [Request(0.0, 10, 3)]) for name in "abc"]
    outcomes = run(models, ((0, 1, 2),))
    assert [each.ttft[0] for each in outcomes] == pytest.approx([quick(10), 2 * quick(10), 3 * quick(10)])
    first, second, third = (each.tpot[0] for each in outcomes)
    assert first == pytest.approx((2 * quick(10) + 2 * quick(1) + 3 * quick(1) - quick(1)) / 2)
    assert third == pytest.approx(3 * quick(1))
    assert first > second > third


def test_a_model_that_is_alone_is_as_on_a_worker_of_its_own() -> None:
    requests = busy(200, 5.0, "alone")
    idle = a_model("idle", [Request(1e6, 1, 1)])
    shared, _ = run([a_model("busy", requests), idle])
    machine = FLEET.machine(a_model("busy", requests), [idle])
    assert machine is not None
    alone = Cluster(Pools(num_both=1), machine, TransferRates(KV_BYTES, *FLEET.link)).run(requests)
    assert (shared.ttft, shared.tpot) == (alone.ttft, alone.tpot)
    assert shared.inter_token == alone.inter_token


def test_a_request_of_a_model_without_a_worker_is_not_served() -> None:
    models = pair([Request(0.0, 10, 3)], [Request(0.0, 10, 3)])
    served, missed = run(models, ((0,), (0,)))
    assert (served.num_requests, missed.num_requests) == (1, 0)
    assert summarise(missed, models[1].objectives).attainment == 0.0


# Conservation


PLACEMENTS: list[Placement] = [((0, 1, 2),), ((0, 1, 2),) * 3, ((0,), (0, 1), (1, 2)), ((0,), (1,), (2,))]


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
@pytest.mark.parametrize("kv_gib", [0.7, 1.5, 50.0])
def test_all_ends_and_every_moment_is_accounted_for(placement: Placement, kv_gib: float) -> None:
    models = [a_model(name, busy(150, 5.0, name), weights_gib=10.0, slow=name == "c") for name in "abc"]
    fleet = replace(FLEET, worker_gib=30.0 + kv_gib)
    # What is run looks after itself that nothing is left on any worker.
    found = run(models, placement, fleet)
    for model, outcomes in zip(models, found, strict=True):
        assert outcomes.num_requests == 150
        assert sum(outcomes.inter_token.values()) == sum(each.num_output_tokens - 1 for each in model.requests)
        by_order = sorted(zip(outcomes.order, outcomes.tpot, strict=True))
        waited = sum(
            tpot * (request.num_output_tokens - 1)
            for (_, tpot), request in zip(by_order, model.requests, strict=True)
            if not math.isnan(tpot)
        )
        assert sum(outcomes.inter_token.elements()) == pytest.approx(waited)
    if len(placement[0]) == 3 and kv_gib < 1:
        assert sum(worker.num_preemptions for outcomes in found for worker in outcomes.workers) > 0


def test_a_worker_takes_one_step_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[tuple[float, float]] = []
    finish = Worker.finish

    def spied(worker: Worker, now: float) -> object:
        steps.append((worker._began, now))
        return finish(worker, now)

    monkeypatch.setattr(Worker, "finish", spied)
    run([a_model(name, busy(100, 6.0, name)) for name in "ab"])
    assert len(steps) > 1000
    assert all(end <= start + 1e-9 for (_, end), (start, _) in itertools.pairwise(steps))


def test_skipping_ahead_equals_step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    models = [a_model(name, busy(100, 1.5, name), slow=name == "b") for name in "ab"]
    fast = run(models, ((0, 1), (0,), (1,)))
    monkeypatch.setattr(Worker, "_run_length", lambda worker: 1)
    for one, other in zip(fast, run(models, ((0, 1), (0,), (1,))), strict=True):
        assert sorted(one.ttft) == pytest.approx(sorted(other.ttft))
        assert gaps(one) == pytest.approx(gaps(other))


def test_what_a_request_costs_does_not_grow_with_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = dict.fromkeys(("events", "views"), 0)
    at, view = Service._at, ByPolicy.view

    def counted_at(self: Service, *arguments: object) -> None:
        counted["events"] += 1
        at(self, *arguments)  # type: ignore[arg-type]

    def counted_view(self: ByPolicy, *arguments: object) -> WorkerView:
        counted["views"] += 1
        return view(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Service, "_at", counted_at)
    monkeypatch.setattr(ByPolicy, "view", counted_view)
    found = []
    for num_workers in (4, 32):
        counted.update(events=0, views=0)
        models = [a_model(name, busy(50 * num_workers, 0.7 * num_workers, name)) for name in "ab"]
        run(models, ((0, 1),) * num_workers)
        found.append([count / (100 * num_workers) for count in counted.values()])
    (few_events, few_views), (many_events, many_views) = found
    assert many_events < 1.3 * few_events
    assert few_views <= many_views <= 7


def test_the_seed_determines_everything() -> None:
    models = [a_model(name, busy(100, 5.0, name)) for name in "ab"]
    runs = [run(models, ((0, 1),) * 6, seed=seed) for seed in (1, 1, 2)]
    assert [each.ttft for each in runs[0]] == [each.ttft for each in runs[1]]
    assert [each.ttft for each in runs[0]] != [each.ttft for each in runs[2]]


# What the router sees, and links


def sharing(models: Sequence[Model]) -> list[SharingService]:
    """Services of the models on one worker, which nothing has come to yet."""
    turns, agenda = Turns(), Agenda()
    services = []
    for model in models:
        machine = FLEET.machine(model, [])
        assert machine is not None
        rates = TransferRates(KV_BYTES, *FLEET.link)
        services.append(SharingService(model.name, {"w": machine}, {"w": turns}, rates, agenda, 0))
    return services


def test_the_router_sees_the_other_models_in_steps_and_streams() -> None:
    request = Request(0.0, 100, 4)
    quicks, slows = sharing(pair([request], [request]))
    (part,), (other,) = quicks.workers, slows.workers
    assert isinstance(quicks.routing, ByPolicy)
    alone = quicks.routing.view(part, request, 0.0)
    assert (alone.num_decoding, alone.max_batch_tokens) == (0, 512)
    assert alone.costs.seconds(101) == pytest.approx(quick(101))
    for order in range(3):
        other.expect(Stream(Request(0.0, 5110, 4), order, 16), 0)
    beside = quicks.routing.view(part, request, 0.0)
    assert (beside.num_decoding, beside.max_batch_tokens) == (3, 515)
    # Of the steps that the request is expected to take, the other model's are full for as long as its prompts last.
    num_steps = 128 + 100 / 512
    num_full = 3 * 5110 / 509
    others = (num_full * slow(512) + (num_steps - num_full) * slow(3)) / num_steps
    assert beside.costs.seconds(3) == pytest.approx(others)
    assert beside.costs.seconds(3 + 100) == pytest.approx(others + quick(100))


def test_models_on_a_worker_share_its_link() -> None:
    request = Request(0.0, 100, 4)
    services = sharing(pair([request], [request]))
    seconds = 0.002 + 1000 * KV_BYTES / 1e9
    done = [service._send(0.0, service.workers[0], service.workers[0], 1000) for service in services * 2]
    assert done == pytest.approx([seconds, 2 * seconds, 3 * seconds, 4 * seconds])


# Memory


def test_what_weights_leave_is_shared_out_evenly_for_kv() -> None:
    first, second = a_model("a", [Request(0.0, 10, 1)], weights_gib=20.0), a_model("b", [Request(0.0, 10, 1)])
    second = replace(second, kv_bytes_per_token=2 * KV_BYTES)
    machines = [FLEET.machine(first, [second]), FLEET.machine(second, [first])]
    tokens = [machine.kv_tokens for machine in machines if machine is not None]
    assert tokens == [22 * GIB / KV_BYTES, 11 * GIB / KV_BYTES]


def test_a_worker_holds_what_leaves_room_for_the_longest_request_of_each() -> None:
    # 0.5 GiB are 4096 tokens.
    models = [a_model(name, [Request(0.0, 4000, 96)], weights_gib=10.0) for name in "ab"]
    assert replace(FLEET, worker_gib=21.0).holds(models)
    assert not replace(FLEET, worker_gib=20.99).holds(models)
    assert replace(FLEET, worker_gib=10.5).holds(models[:1])
    assert not replace(FLEET, worker_gib=10.49).holds(models[:1])
    assert FLEET.gib(models[0]) == 10.5
    with pytest.raises(ValueError, match="a worker of 20 GiB has no room for a, b together"):
        run(models, ((0, 1),), replace(FLEET, worker_gib=20.0))
