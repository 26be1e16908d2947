"""Placement in cases whose answer is plain, and under a stream of requests."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from services.router.workers.placement import WorkerLoad, choose
from shared.rpc.errors import Unavailable


def _worker(name: str, running: int = 0, waiting: int = 0, kv_usage: float = 0.0, alive: bool = True) -> WorkerLoad:
    return WorkerLoad(name, running, waiting, kv_usage, alive)


@pytest.mark.parametrize(
    ("workers", "num_blocks", "hits", "expected"),
    [
        # Idle and cold: the first; a rotated list moves it on.
        ([_worker("a"), _worker("b")], 10, {}, "a"),
        ([_worker("b"), _worker("a")], 10, {}, "b"),
        # The longer prefix, and one at all.
        ([_worker("a"), _worker("b")], 10, {"b": 1}, "b"),
        ([_worker("a"), _worker("b")], 10, {"a": 4, "b": 5}, "b"),
        # Load decides without a prefix.
        ([_worker("a", running=2), _worker("b", running=1)], 10, {}, "b"),
        ([_worker("a", running=1), _worker("b", waiting=1)], 10, {}, "a"),
        ([_worker("a", kv_usage=0.95), _worker("b", kv_usage=0.8)], 10, {}, "b"),
        # KV use below the pressure mark is no load.
        ([_worker("a", kv_usage=0.8), _worker("b", kv_usage=0.0)], 10, {}, "a"),
        # A hit of 40 blocks is worth 10 running sequences; at equal cost the lesser load.
        ([_worker("a", running=9), _worker("b")], 64, {"a": 40}, "a"),
        ([_worker("a", running=10), _worker("b")], 64, {"a": 40}, "b"),
        ([_worker("a", running=11), _worker("b")], 64, {"a": 40}, "b"),
        # A worker that claims more blocks than the prompt has gains nothing by it.
        ([_worker("a", running=1), _worker("b")], 3, {"a": 1000}, "b"),
        # The dead are not chosen, whatever they held; instances no longer listed do not matter.
        ([_worker("a", alive=False), _worker("b", running=50)], 64, {"a": 64, "gone": 64}, "b"),
        # No full block.
        ([_worker("a", running=1), _worker("b")], 0, {}, "b"),
    ],
)
def test_plain_cases(workers: list[WorkerLoad], num_blocks: int, hits: dict[str, int], expected: str) -> None:
    assert choose(workers, num_blocks, hits) == expected


@pytest.mark.parametrize("workers", [[], [_worker("a", alive=False)]])
def test_nobody_alive(workers: list[WorkerLoad]) -> None:
    with pytest.raises(Unavailable):
        choose(workers, 4, {})


def test_a_hot_prefix_gathers_and_then_spreads() -> None:
    """200 requests with one 40-block prefix that only worker 0 holds at first, none ending."""
    loads = [_worker(str(index)) for index in range(4)]
    hits = {"0": 40}
    order = []
    for _ in range(200):
        chosen = choose(loads, 42, hits)
        order.append(chosen)
        loads = [replace(w, num_running=w.num_running + (w.instance_id == chosen)) for w in loads]
        hits[chosen] = 40
    counts = Counter(order)
    assert order[:10] == ["0"] * 10
    assert sum(counts.values()) == 200
    assert max(counts.values()) - min(counts.values()) <= 11


def test_more_load_or_less_prefix_never_attracts() -> None:
    rng = random.Random(0)
    for _ in range(500):
        num_blocks = rng.randint(0, 100)
        workers = [
            _worker(str(i), rng.randint(0, 30), rng.randint(0, 4), rng.random()) for i in range(rng.randint(2, 6))
        ]
        hits = {worker.instance_id: rng.randint(0, num_blocks) for worker in workers}
        chosen = choose(workers, num_blocks, hits)
        loser = rng.choice([worker for worker in workers if worker.instance_id != chosen])
        worse = replace(loser, num_running=loser.num_running + rng.randint(0, 5), kv_usage=min(1, loser.kv_usage + 0.1))
        worse_hits = {**hits, loser.instance_id: rng.randint(0, hits[loser.instance_id])}
        assert choose([worse if w is loser else w for w in workers], num_blocks, worse_hits) == chosen
