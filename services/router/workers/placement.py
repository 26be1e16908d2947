"""Which target worker serves a prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shared.rpc.errors import Unavailable

# Costs in blocks of prefill. A running sequence takes its share of every step that this one waits for; a
# waiting one says that the worker is full already, and is served first.
_RUNNING_COST = 4.0
_WAITING_COST = 16.0
# Above this share of KV in use, sequences are soon preempted and computed again; full costs _KV_COST.
_KV_PRESSURE_FROM = 0.8
_KV_COST = 64.0


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """What the router knows of a target worker. `kv_usage`: share of its KV blocks in use, 0 to 1."""

    instance_id: str
    num_running: int
    num_waiting: int
    kv_usage: float
    alive: bool


def choose(workers: Sequence[WorkerLoad], num_prompt_blocks: int, prefix_hits: Mapping[str, int]) -> str:
    """The instance_id of the worker where a prompt costs least; raises Unavailable if none is alive.

    `prefix_hits`: full blocks of the prompt, of its `num_prompt_blocks`, whose KV an instance holds already;
    0 for those not named. In blocks of prefill,

        cost = (num_prompt_blocks - hit) + 4 running + 16 waiting + 64 max(0, kv_usage - 0.8) / 0.2

    so a hit of b blocks is followed until its worker has b / 4 more sequences running than another: a hot
    prefix gathers where it is cached, then spreads. Equal costs go to the lesser load, then to the first
    in `workers` (a caller that rotates them serves such workers in turn).
    """
    alive = [worker for worker in workers if worker.alive]
    if not alive:
        raise Unavailable("no target worker is alive")

    def cost(worker: WorkerLoad) -> tuple[float, float]:
        hit = min(prefix_hits.get(worker.instance_id, 0), num_prompt_blocks)
        load = _load(worker)
        return num_prompt_blocks - hit + load, load

    return min(alive, key=cost).instance_id


def _load(worker: WorkerLoad) -> float:
    kv_pressure = max(0.0, worker.kv_usage - _KV_PRESSURE_FROM) / (1 - _KV_PRESSURE_FROM)
    return _RUNNING_COST * worker.num_running + _WAITING_COST * worker.num_waiting + _KV_COST * kv_pressure
