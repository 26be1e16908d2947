"""The fewest workers that meet the SLOs: in separate pools, or doing both."""

from __future__ import annotations

from collections.abc import Callable

from services.simulator.cluster import Pools

# Whether pools meet the SLOs. More workers are taken never to do worse.
Meets = Callable[[Pools], bool]


def least_of_both(meets: Meets, most_workers: int) -> Pools | None:
    """The fewest workers that prefill and decode; None if so many are not enough."""
    few, enough = 0, 1
    while not meets(Pools(num_both=enough)):
        if enough >= most_workers:
            return None
        few, enough = enough, min(2 * enough, most_workers)
    return Pools(num_both=_least(lambda number: meets(Pools(num_both=number)), few + 1, enough))


def least_separate(meets: Meets, most_workers: int) -> Pools | None:
    """The fewest prefill and decode workers together; None if so many are not enough.

    With one more prefill worker no more decode workers are needed than before, so each is looked for below the last.
    """
    best: Pools | None = None
    most_decode = most_workers
    num_prefill = 1
    # Only what has fewer workers than the best so far is of interest.
    while (limit := min(most_decode, most_workers - num_prefill)) >= 1:
        if meets(Pools(num_prefill, limit)):
            most_decode = _least(_decoders_beside(num_prefill, meets), 1, limit)
            best = Pools(num_prefill, most_decode)
            most_workers = best.num_workers - 1
        num_prefill += 1
    return best


def _decoders_beside(num_prefill: int, meets: Meets) -> Callable[[int], bool]:
    return lambda num_decode: meets(Pools(num_prefill, num_decode))


def _least(holds: Callable[[int], bool], least: int, enough: int) -> int:
    """The least number for which it holds, from `least` on; for `enough` it is known to."""
    while least < enough:
        middle = (least + enough) // 2
        if holds(middle):
            enough = middle
        else:
            least = middle + 1
    return enough
