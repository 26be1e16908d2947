"""`make chaos`: kills, stops, restarts and cut lines at random instants, under seeded streams on pools.

python -m tests.benchmarks.chaos --faults 200 --seed 1
"""

from __future__ import annotations

import argparse
import asyncio

from rich.console import Console

from tests.support.chaos import Campaign, chaos_stack

console = Console(highlight=False)


async def _run(num_faults: int, seed: int, kv_transfer: str) -> None:
    async with chaos_stack(kv_transfer) as stack:
        campaign = Campaign(stack, seed, report=console.print)
        await campaign.run(num_faults)
    counts = ", ".join(
        f"{kind} {fault.value} {count}" for (kind, fault), count in sorted(campaign.faults.items(), key=str)
    )
    console.print(
        f"{sum(campaign.faults.values())} faults ({counts}): {campaign.num_streams} streams, every one as undisturbed, "
        f"the longest in {campaign.longest_seconds:.1f} s; nothing left behind"
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.chaos", description=__doc__)
    parser.add_argument("--faults", type=int, default=200, help="How many; default 200.")
    parser.add_argument("--seed", type=int, default=1, help="Of the dice; default 1.")
    parser.add_argument("--kv-transfer", default="auto", help="auto, nixl or grpc; default auto.")
    options = parser.parse_args()
    asyncio.run(_run(options.faults, options.seed, options.kv_transfer))


if __name__ == "__main__":
    main()
