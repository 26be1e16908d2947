"""Loads that grow: from nothing to their rate."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from services.simulator.workload import Request


def ramped(requests: Iterable[Request], seconds: float) -> Iterator[Request]:
    """The requests of a steady load, the first of them rarer: its rate grows linearly from 0 within `seconds`.

    Where the steady load had so many requests by u, this one has by t with t² / (2 s) = u on the way up, and with
    t - s / 2 = u behind it: the time change that makes one process of the other.
    """
    for request in requests:
        u = request.time
        time = math.sqrt(2 * seconds * u) if u < seconds / 2 else u + seconds / 2
        yield request._replace(time=time)
