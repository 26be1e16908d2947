"""What routing and prefixes bring in the simulator, and its parts."""

from __future__ import annotations

import random

import pytest

from services.simulator.blocks import Blocks
from services.simulator.cluster import Cluster, Pools
from services.simulator.holders import Holders
from services.simulator.outcomes import quantiles
from services.simulator.routing import Route, Routing, RoutingName
from services.simulator.workload import Lengths, Request, SharedPrefixes, Workload
from shared.policy.placement import TransferRates
from tests.support.simulated_cluster import MACHINE, RATES, busy_workload, run, step


@pytest.mark.parametrize("pools", [Pools(num_both=4), Pools(2, 2)], ids=str)
def test_the_policy_is_better_than_the_baselines(pools: Pools) -> None:
    prefixes = SharedPrefixes(6, 2048, share=0.8)
    workload = Workload(34.0, 1500, Lengths(400, 1.0), Lengths(100, 0.8), 1.5, prefixes)
    requests = list(workload.requests(0))
    rates = TransferRates(1e5, 0.002, 1e10)
    p99 = {name: quantiles(Cluster(pools, MACHINE, rates, name).run(requests).ttft, [0.99])[0] for name in RoutingName}
    assert p99[RoutingName.POLICY] < 0.8 * p99[RoutingName.ROUND_ROBIN]
    assert p99[RoutingName.POLICY] < 0.8 * p99[RoutingName.AFFINITY]


def test_affinity_finds_each_prefix_where_it_was() -> None:
    requests = [Request(float(i), 800, 2, f"prefix-{i % 5}", 640) for i in range(50)]
    outcomes = run(requests, Pools(num_both=4), routing=RoutingName.AFFINITY)
    assert outcomes.cached_tokens == 45 * 640


def test_a_prefix_is_fetched_where_that_is_faster() -> None:
    prefix = Request(0.0, 4096, 400, "system", 4000)
    requests = [prefix] + [prefix._replace(time=2.0 + 0.001 * i, num_prompt_tokens=4400) for i in range(40)]
    fast = Cluster(Pools(num_both=2), MACHINE, TransferRates(1e5, 0.002, 1e11)).run(requests)
    slow = Cluster(Pools(num_both=2), MACHINE, TransferRates(1e5, 0.002, 1e6)).run(requests)
    # With the first, all but the first request find it; with the second, another computes it.
    assert fast.cached_tokens == 40 * 4000
    assert slow.cached_tokens < 40 * 4000


@pytest.mark.parametrize(("begun_there", "begun_here"), [(None, None), (10.0, None), (10.0, 10.004), (10.004, 10.0)])
def test_a_fetch_waits_for_the_steps_of_both(begun_there: float | None, begun_here: float | None) -> None:
    """First for the one where the blocks come to, then for the one where they are."""

    class Placed(Routing):
        """By the prefix: "p" is on the first worker, and who asks for it at 10.01 s fetches it from there."""

        def place(self, request: Request, now: float) -> Route:
            there, here = cluster.workers
            if now == 10.01:
                return Route(here, source=there, fetch_tokens=160)
            return Route(here if now == begun_here else there)

    cluster = Cluster(Pools(num_both=2), MACHINE, RATES)
    cluster.routing = Placed()
    requests = [Request(0.0, 200, 1, "p", 160), Request(10.01, 200, 1, "p", 160)]
    requests += [Request(begun, 500, 1) for begun in (begun_there, begun_here) if begun is not None]
    outcomes = cluster.run(sorted(requests))
    (fetched,) = [ttft for order, ttft in zip(outcomes.order, outcomes.ttft, strict=True) if order == len(requests) - 1]
    here_free = 10.01 if begun_here is None else begun_here + step(500)
    there_free = here_free if begun_there is None else max(here_free, begun_there + step(500))
    came = there_free + RATES.seconds("0", "1", 160)
    assert fetched == pytest.approx(came - 10.01 + step(40))


def test_the_seed_determines_everything() -> None:
    def numbers(seed: int) -> list[float]:
        requests = busy_workload(200).requests(seed)
        return list(Cluster(Pools(num_both=6), MACHINE, RATES, seed=seed).run(requests).ttft)

    assert numbers(3) == numbers(3)
    assert numbers(3) != numbers(4)


def test_blocks_are_conserved_whatever_happens() -> None:
    """Random sequences own, extend and leave prefixes; the holders told of it agree with the blocks."""
    rng = random.Random(0)
    for _ in range(30):
        depths: dict[str, int] = {}

        def changed(prefix_id: str, before: int, after: int, depths: dict[str, int] = depths) -> None:
            assert depths.pop(prefix_id, 0) == before
            if after:
                depths[prefix_id] = after

        blocks = Blocks(60, changed)
        owned: list[tuple[str, int]] = []
        for _ in range(300):
            prefix_id = rng.choice("abc")
            if rng.random() < 0.5:
                found, wanted = blocks.depth(prefix_id), rng.randint(1, 20)
                if wanted + blocks.num_unowned(prefix_id) <= blocks.num_allocatable:
                    blocks.own(prefix_id)
                    blocks.allocate(wanted)
                    owned.append((prefix_id, wanted - blocks.extend(prefix_id, found + rng.randint(0, wanted))))
            elif owned and rng.random() < 0.7:
                prefix_id, count = owned.pop(rng.randrange(len(owned)))
                blocks.release(count)
                blocks.disown(prefix_id)
            else:
                blocks.receive(prefix_id, rng.randint(1, 30))
            blocks.check()
            assert {each: blocks.depth(each) for each in "abc" if blocks.depth(each)} == depths
        for prefix_id, count in owned:
            blocks.release(count)
            blocks.disown(prefix_id)
        assert blocks.num_owned == 0
        blocks.check()


def test_holders_are_known_by_depth() -> None:
    holders, depths = Holders(), dict.fromkeys(map(str, range(20)), 0)
    rng = random.Random(0)
    for _ in range(2000):
        worker, depth = rng.choice(list(depths)), rng.choice([0, 1, 2, 5])
        holders.change("p", worker, depths[worker], depth)
        depths[worker] = depth
    levels = [set(level) for level in holders.deepest("p", 2)]
    expected = [{worker for worker, depth in depths.items() if depth == wanted} for wanted in (5, 2)]
    assert levels == expected
    for worker, depth in depths.items():
        holders.change("p", worker, depth, 0)
    assert not list(holders.deepest("p", 3))
    assert not list(holders.deepest("unknown", 3))
