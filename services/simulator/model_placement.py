"""Which worker holds which models: two simple answers, and a search by simulated SLO attainment.

The question, and the greedy search, are AlpaServe's (Li et al., OSDI 2023): models that share workers can each use what
the others leave idle, so bursts of one find more workers than it would have for itself. Their other half, models split
over the workers of a group, is left out: a group is one worker here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from services.simulator.model import Fleet, Model, Placement

# Of each model, the share of requests within their SLOs under a placement.
Attainments = Callable[[Placement], Sequence[float]]


def dedicated(models: Sequence[Model], fleet: Fleet) -> Placement | None:
    """Each model has workers of its own, as many as its load asks for; None if there are fewer workers than models.

    A load is the seconds of full steps that its tokens take. After one worker for each model, the next always goes to
    the one with most load per worker (d'Hondt).
    """
    if len(models) > fleet.num_workers:
        return None
    loads = [_load(model, fleet.max_batch_tokens) for model in models]
    counts = [1] * len(models)
    while sum(counts) < fleet.num_workers:
        counts[max(range(len(models)), key=lambda number: loads[number] / counts[number])] += 1
    return tuple((number,) for number, count in enumerate(counts) for _ in range(count))


def everywhere(models: Sequence[Model], fleet: Fleet) -> Placement:
    """Every model on every worker, as far as there is room: each worker begins with another model."""
    placement = []
    for worker in range(fleet.num_workers):
        placed: tuple[int, ...] = ()
        for place in range(len(models)):
            more = _with(placed, (worker + place) % len(models))
            if _fits(models, more, fleet):
                placed = more
        placement.append(placed)
    return _canonical(placement)


def greedy(models: Sequence[Model], fleet: Fleet, attainments: Attainments) -> Placement:
    """The best placement met on the way from empty workers to full ones.

    In each round the one model goes onto the one worker with which the simulation attains most, though that may be
    less than before (AlpaServe's Algorithm 1 with a beam of 1). Workers with the same models are alike: one is tried.
    """
    placement: Placement = ((),) * fleet.num_workers
    best: tuple[list[float], Placement] = [0.0] * len(models), placement
    while best[0][0] < 1.0 and (following := _one_more(models, placement, fleet)):
        judged = [(merit(attainments(each)), each) for each in following]
        reached = max(judged, key=lambda pair: pair[0])
        placement = reached[1]
        best = max(best, reached, key=lambda pair: pair[0])
    return best[1]


def merit(attained: Sequence[float]) -> list[float]:
    """What a placement is judged by: the model that attains least counts first, then the next (leximin).

    AlpaServe takes the share of all requests together. That gives up a model with a small load, or one that is costly
    to serve, for the sake of the others.
    """
    return sorted(attained)


def _one_more(models: Sequence[Model], placement: Placement, fleet: Fleet) -> list[Placement]:
    """All that have one model more on one worker; of those equally good, the search takes the first: on the worker
    with fewest models."""
    found: dict[Placement, None] = {}
    for worker in sorted(range(len(placement)), key=lambda worker: len(placement[worker])):
        for number in range(len(models)):
            more = _with(placement[worker], number)
            if number not in placement[worker] and _fits(models, more, fleet):
                found[_canonical([*placement[:worker], more, *placement[worker + 1 :]])] = None
    return list(found)


def _canonical(placement: Sequence[tuple[int, ...]]) -> Placement:
    """Workers are alike: in one order."""
    return tuple(sorted(placement))


def _with(placed: tuple[int, ...], number: int) -> tuple[int, ...]:
    return tuple(sorted((*placed, number)))


def _fits(models: Sequence[Model], placed: Sequence[int], fleet: Fleet) -> bool:
    return fleet.holds([models[number] for number in placed])


def _load(model: Model, max_batch_tokens: int) -> float:
    num_tokens = sum(request.num_prompt_tokens + request.num_output_tokens for request in model.requests)
    return num_tokens * model.costs.seconds(max_batch_tokens) / max_batch_tokens
