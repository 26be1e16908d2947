"""`make fuzz`: a million malformed and hostile messages to every method of the services.

python -m tests.benchmarks.fuzz --messages 1000000 --seed 1
"""

from __future__ import annotations

import argparse
import asyncio
import sys

from rich.console import Console
from rich.table import Table

from services.cli.stack import Stack
from shared.rpc.channel import connect
from tests.benchmarks.memory import resident
from tests.support.fuzz import METHODS, Fuzz
from tests.support.service import generate, inference, running_stack, wait_until_idle

console = Console(highlight=False)

_TURNS = 10


async def _run(num_messages: int, seed: int) -> bool:
    fuzz = Fuzz(seed)
    # Caches that are soon as full as they get: what grows then is none.
    small = {"target-0": {"OUTRIDER_TARGET_KV_CACHE_GIB": "0.1"}, "draft": {"OUTRIDER_DRAFT_KV_CACHE_GIB": "0.05"}}
    async with running_stack(small) as stack, inference(stack) as stub:
        expected = (await generate(stub, "def main():\n", seed=1, max_tokens=16)).token_ids
        sizes = [_sizes(stack)]
        for turn in range(_TURNS):
            fuzz.seed = seed * _TURNS + turn
            for name, process in list(stack.processes.items()):
                share = num_messages // (_TURNS * len(stack.processes))
                await fuzz.run(process.address, METHODS[name.partition("-")[0]], share, connect)
            await wait_until_idle(stack)
            sizes.append(_sizes(stack))
            console.print(f"{fuzz.num_messages:9,} messages; resident: {_told(sizes[-1])}")
        assert (await generate(stub, "def main():\n", seed=1, max_tokens=16)).token_ids == expected
        restarts = sum(process.restarts for process in stack.processes.values())
    table = Table("method", "status", "RPCs", box=None)
    for (method, status), count in sorted(fuzz.statuses.items()):
        table.add_row(method, status, f"{count:,}")
    console.print(table)
    console.print(f"{fuzz.num_messages:,} messages; {restarts} restarts; resident before: {_told(sizes[0])}")
    for (method, status), count in fuzz.unexpected.items():
        console.print(f"[red]{method}: {status} ({count:,})[/]")
    return not fuzz.unexpected and not restarts


def _sizes(stack: Stack) -> dict[str, float]:
    """MiB of each process's memory."""
    return {name: resident(process.pid) for name, process in stack.processes.items() if process.pid is not None}


def _told(sizes: dict[str, float]) -> str:
    return ", ".join(f"{name} {size:.0f} MiB" for name, size in sizes.items())


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.fuzz", description=__doc__)
    parser.add_argument("--messages", type=int, default=1_000_000, help="How many; default a million.")
    parser.add_argument("--seed", type=int, default=1, help="Of the dice; default 1.")
    options = parser.parse_args()
    if not asyncio.run(_run(options.messages, options.seed)):
        sys.exit("fuzz: see above")


if __name__ == "__main__":
    main()
