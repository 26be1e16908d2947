"""The fewest workers that do."""

from __future__ import annotations

import random

from services.simulator.cluster import Pools
from services.simulator.pool_sizes import least_of_both, least_separate


def test_the_fewest_workers_are_found_with_few_simulations() -> None:
    """Against all of them, for needs that are random but never grow with more workers."""
    rng = random.Random(0)
    for _ in range(300):
        most = rng.randint(1, 40)
        needed = rng.randint(1, 50)
        # Decode workers that are needed beside so many prefill workers, which never become more.
        beside = sorted((rng.randint(1, 60) for _ in range(most)), reverse=True)
        calls = 0

        def meets(pools: Pools, needed: int = needed, beside: list[int] = beside) -> bool:
            nonlocal calls
            calls += 1
            return pools.num_both >= needed if pools.num_both else pools.num_decode >= beside[pools.num_prefill - 1]

        assert least_of_both(meets, most) == (Pools(num_both=needed) if needed <= most else None)
        assert calls <= 13
        calls = 0
        totals = [p + d for p, d in enumerate(beside, 1) if p + d <= most]
        found = least_separate(meets, most)
        assert (found.num_workers if found is not None else None) == min(totals, default=None)
        assert found is None or meets(found)
        assert calls <= 4 * most + 1
