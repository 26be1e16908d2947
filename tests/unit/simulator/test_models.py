"""Several models on shared simulated workers: turns, memory, placements, what is read and reported."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from services.cli.simulate_models import place_models
from services.simulator.cluster import Agenda, Cluster, Pools, Service
from services.simulator.costs import linear_costs
from services.simulator.model import GIB, Fleet, Link, Model, Placement
from services.simulator.model_file import ModelsError, read_descriptions, read_models
from services.simulator.model_placement import dedicated, everywhere, greedy, merit
from services.simulator.outcomes import Outcomes
from services.simulator.report import Objectives, summarise
from services.simulator.routing import ByPolicy
from services.simulator.sharing import simulate_models
from services.simulator.stream import Stream
from services.simulator.trace import TraceError, read_traces
from services.simulator.turns import SharingService, Turns
from services.simulator.worker import Worker
from services.simulator.workload import Lengths, Request, SharedPrefixes, Workload
from shared.policy.placement import TransferRates, WorkerView
from tests.support.simulate_command import command

KV_BYTES = 131_072.0
FLEET = Fleet(
    num_workers=2, worker_gib=80.0, max_batch_tokens=512, max_sequences=128, block_size=16, link=Link(0.002, 1e9)
)
TOGETHER: Placement = ((0, 1),)


def quick(num_tokens: int) -> float:
    return 0.01 + num_tokens / 25_000


def slow(num_tokens: int) -> float:
    return 0.03 + num_tokens / 10_000


def a_model(name: str, requests: Sequence[Request], *, weights_gib: float = 16.0, slow: bool = False) -> Model:
    costs = linear_costs(0.03, 10_000, 512) if slow else linear_costs(0.01, 25_000, 512)
    return Model(name, costs, weights_gib, KV_BYTES, requests, Objectives(1.0, 0.1))


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


def busy(num_requests: int, rate: float, seed: str, burstiness: float = 2.0) -> list[Request]:
    prefixes = SharedPrefixes(5, 200, share=0.6)
    return list(Workload(rate, num_requests, Lengths(200, 0.8), Lengths(40, 0.8), burstiness, prefixes).requests(seed))


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


# Placements


def small(names: str, **weights: float) -> list[Model]:
    return [a_model(name, [Request(0.0, 100, 10)], weights_gib=weights.get(name, 10.0)) for name in names]


def test_dedicated_workers_go_by_load() -> None:
    models = [a_model(name, [Request(0.0, 100, 10)] * number) for name, number in (("a", 60), ("b", 20), ("c", 1))]
    assert dedicated(models, replace(FLEET, num_workers=8)) == ((0,),) * 5 + ((1,),) * 2 + ((2,),)
    assert dedicated(models, replace(FLEET, num_workers=3)) == ((0,), (1,), (2,))
    assert dedicated(models, FLEET) is None


def test_everywhere_is_as_far_as_there_is_room() -> None:
    assert everywhere(small("abc"), FLEET) == ((0, 1, 2), (0, 1, 2))
    # Two of three: each worker begins with another one, so that none is left out.
    tight = replace(FLEET, num_workers=3, worker_gib=21.0)
    assert everywhere(small("abc"), tight) == ((0, 1), (0, 2), (1, 2))
    assert everywhere(small("ab", a=20.0), tight) == ((0,), (0,), (1,))


def test_the_search_keeps_to_the_memory_and_finds_what_each_model_needs() -> None:
    """With attainments that are known: a model needs so many workers, and loses a little with each neighbour."""
    models, needs = small("abc", a=20.0), (3, 2, 1)
    fleet = replace(FLEET, num_workers=4, worker_gib=31.0)
    tried: list[Placement] = []

    def attainments(placement: Placement) -> list[float]:
        tried.append(placement)
        held = [sum(number in placed for placed in placement) for number in range(3)]
        return [min(1.0, held[number] / needs[number]) - 0.01 * held.count(4) for number in range(3)]

    found = greedy(models, fleet, attainments)
    assert [sum(number in placed for placed in found) >= needs[number] for number in range(3)] == [True] * 3
    assert all(fleet.holds([models[number] for number in placed]) for each in tried for placed in each)
    assert len(tried) == len(set(tried)) < 60


def test_the_least_attainment_counts_first() -> None:
    assert merit([0.9, 0.2]) < merit([0.3, 0.3]) < merit([0.4, 0.3])


def loads(rate: float, burstiness: float, seed: int) -> list[Model]:
    workload = Workload(rate, 500, Lengths(500, 0.5), Lengths(100, 0.5), burstiness)
    return [
        Model(name, linear_costs(0.02, 10_000, 512), 16.0, KV_BYTES, list(workload.requests(f"{seed} {name}")), each)
        for name, each in (("a", Objectives(1.0, 0.1)), ("b", Objectives(1.0, 0.1)))
    ]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_bursts_are_served_better_by_shared_workers(seed: int) -> None:
    """AlpaServe's point: the same hardware, and bursts that do not come together."""
    runs = place_models(loads(2.0, 6.0, seed), FLEET, seed, search=True)
    assert min(runs["everywhere"].attained) > min(runs["dedicated"].attained) + 0.03
    assert sum(runs["everywhere"].attained) > sum(runs["dedicated"].attained) + 0.06
    assert min(runs["found"].attained) >= min(runs["everywhere"].attained)
    assert ["a", "b"] in runs["found"].workers


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_steady_loads_that_fill_the_workers_are_not(seed: int) -> None:
    runs = place_models(loads(12.5, 1.0, seed), FLEET, seed, search=True)
    assert max(runs["dedicated"].attained) < 0.9
    assert min(runs["everywhere"].attained) <= min(runs["dedicated"].attained)
    assert sum(runs["everywhere"].attained) <= sum(runs["dedicated"].attained)


@pytest.mark.parametrize("seed", [0, 1])
def test_what_is_found_is_no_worse_than_the_simple_placements(seed: int) -> None:
    rates = {"a": 6.0, "b": 2.0, "c": 0.7}
    models = [
        a_model(name, busy(int(15 * rate), rate, f"{seed} {name}", 3.0), slow=name == "c")
        for name, rate in rates.items()
    ]
    models = [replace(model, objectives=Objectives(0.4, 0.05)) for model in models]
    fleet = replace(FLEET, num_workers=3, worker_gib=40.0)
    runs = place_models(models, fleet, seed, search=True)
    assert list(runs) == ["dedicated", "everywhere", "found"]
    assert all(merit(runs["found"].attained) >= merit(each.attained) for each in runs.values())
    assert "found" not in place_models(models, fleet, seed, search=False)


# The file


DEFAULTS: dict[str, object] = {
    "kv_bytes_per_token": KV_BYTES,
    "step_seconds": 0.02,
    "tokens_per_second": 20_000.0,
    "step_costs": None,
    "rate": 4.0,
    "burstiness": 1.0,
    "prompt_tokens": 500.0,
    "prompt_variation": 1.0,
    "output_tokens": 200.0,
    "output_variation": 1.0,
    "slo_ttft": 1.0,
    "slo_tpot": 0.05,
}


def written(folder: Path, text: str, name: str = "models.toml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def read(path: Path, trace: Path | None = None, defaults: dict[str, object] = DEFAULTS) -> list[Model]:
    return read_models(path, defaults, num_requests=90, fleet=FLEET, prefixes=None, trace=trace, seed=0)


def test_models_are_read_with_what_they_leave_out(tmp_path: Path) -> None:
    text = "[chat]\nweights_gib = 16\nrate = 2\nslo_ttft = 3\n['org/code']\nweights_gib = 0.5\nstep_seconds = 0.01\n"
    chat, code = read(written(tmp_path, text))
    assert (chat.name, chat.weights_gib, chat.objectives) == ("chat", 16.0, Objectives(3.0, 0.05))
    assert (code.name, code.weights_gib, code.objectives) == ("org/code", 0.5, Objectives(1.0, 0.05))
    assert chat.costs.seconds(512) == pytest.approx(0.02 + 512 / 20_000)
    assert code.costs.seconds(512) == pytest.approx(0.01 + 512 / 20_000)
    # By their rates, over the same time, and each with bursts of its own.
    assert (len(chat.requests), len(code.requests)) == (30, 60)
    ratios = {round(one.time / other.time, 6) for one, other in zip(chat.requests, code.requests, strict=False)}
    assert len(ratios) == 30


def test_measured_steps_lie_beside_the_file(tmp_path: Path) -> None:
    written(tmp_path, "[[1, 0.5]]", "measured.json")
    elsewhere = written(tmp_path, "[[1, 0.25]]", "default.json")
    text = (
        "[a]\nweights_gib = 1\nstep_costs = 'measured.json'\n[b]\nweights_gib = 1\n"
        "[c]\nweights_gib = 1\nstep_seconds = 0.125\n"
    )
    models = read(written(tmp_path, text), defaults={**DEFAULTS, "step_costs": str(elsewhere)})
    assert [model.costs.seconds(1) for model in models] == pytest.approx([0.5, 0.25, 0.125 + 1 / 20_000])


def test_a_trace_has_the_requests_of_each_model(tmp_path: Path) -> None:
    models = written(tmp_path, "[a]\nweights_gib = 1\n[b]\nweights_gib = 1\n")
    rows = "time,prompt_tokens,output_tokens,model\n107,10,20,a\n105,30,4,b\n106,5,6,a\n"
    first, second = read(models, written(tmp_path, rows, "trace.csv"))
    # Counted from the first of all.
    assert first.requests == [Request(1.0, 5, 6), Request(2.0, 10, 20)]
    assert second.requests == [Request(0.0, 30, 4)]


@pytest.mark.parametrize(
    ("rows", "complaint"),
    [
        ("1,1,1,a\n2,1,1,z\n", "line 3: field model is 'z': must be one of 'a', 'b'"),
        ("1,1,1,a\n2,1,1,\n", "line 3: field model is missing"),
        ("1,1,1,a\n", "no requests of model 'b'"),
    ],
)
def test_a_trace_that_does_not_go_with_the_models(tmp_path: Path, rows: str, complaint: str) -> None:
    path = written(tmp_path, f"time,prompt_tokens,output_tokens,model\n{rows}", "trace.csv")
    with pytest.raises(TraceError) as raised:
        read_traces(path, ["a", "b"])
    assert str(raised.value) in (f"{path}, {complaint}", f"{path}: {complaint}")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[chat", ": not TOML: "),
        ("", ": no models: must have a table for each"),
        ("rate = 4", ": 'rate' is 4: must be the table of a model, [rate]"),
        ("[a]\nrate = 1", ", model 'a': field weights_gib is missing"),
        ("[a]\nweights_gib = -1", ", model 'a': field weights_gib is -1: must be greater than or equal to 0"),
        ("[a]\nweights_gib = '16'", ", model 'a': field weights_gib is '16': must be a valid number"),
        ("[a]\nweights_gib = true", ", model 'a': field weights_gib is True: must be a valid number"),
        ("[a]\nweights_gib = inf", ", model 'a': field weights_gib is inf: must be a finite number"),
        ("[a]\nweights_gib = 1\nslo_ttfb = 1", ", model 'a': field slo_ttfb is not known: must be one of weights_gib,"),
        ("[a]\nweights_gib = 1\nrate = 0", ", model 'a': field rate is 0: must be greater than 0"),
        ("[a]\nweights_gib = 1\nstep_costs = 5", ", model 'a': field step_costs is 5: must be a valid string"),
        (
            "[a]\nweights_gib = 81",
            ", model 'a': field weights_gib is 81: a worker of 80 GiB must have room for 81",
        ),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, complaint: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ModelsError) as raised:
        read(path)
    assert str(raised.value).startswith(f"{path}{complaint}")
    assert "\n" not in str(raised.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelsError, match=r"nowhere\.toml: .*No such file"):
        read_descriptions(tmp_path / "nowhere.toml", DEFAULTS)


# The command


def test_the_command_finds_a_placement_and_writes_json(tmp_path: Path) -> None:
    models = written(
        tmp_path, "[chat]\nweights_gib = 16\nrate = 6\n[code]\nweights_gib = 30\nrate = 2\nburstiness = 4\n"
    )
    paths = [tmp_path / name for name in ("one.json", "other.json")]
    for path in paths:
        code, text = command(
            *("--models", str(models), "--both", "3", "--plan", "--requests", "120", "--slo-tpot", "0.03"),
            *("--json", str(path)),
        )
        assert code == 0, text
        for expected in ("dedicated", "everywhere", "found", "worker-2", "within both SLOs, code", "least of the"):
            assert expected in text
    assert paths[0].read_bytes() == paths[1].read_bytes()
    runs = json.loads(paths[0].read_text())
    assert [run["name"] for run in runs] == ["dedicated", "everywhere", "found"]
    assert runs[0]["workers"] == [["chat"], ["chat"], ["code"]]
    for each in runs:
        assert sum(model["requests"] for model in each["models"].values()) == 120
        assert each["least_attainment"] == min(model["attainment"] for model in each["models"].values())
        assert each["models"]["chat"]["slo_tpot"] == 0.03


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--both", "0"], "several models need workers that do both: at least 1, not 0"),
        (["--worker-gib", "10"], "a worker of 10 GiB must have room for"),
        (["--prefill", "2"], "--prefill is for one model, not for --models"),
        (["--kv-tokens", "64"], "--kv-tokens is for one model, not for --models"),
        (["--max-batch-tokens", "100"], "256 sequences do not fit a step of 100 tokens"),
        (["--trace", "nowhere.csv"], "nowhere.csv"),
    ],
)
def test_the_command_says_what_is_wrong(tmp_path: Path, arguments: list[str], complaint: str) -> None:
    models = written(tmp_path, "[chat]\nweights_gib = 16\n")
    code, text = command("--models", str(models), *arguments)
    assert code == 2
    assert complaint in text
