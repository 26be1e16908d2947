"""`make soak`: a quarter of an hour of load on the container stack, with a fault every 20 seconds.

python -m tests.benchmarks.soak --minutes 15 --every 20
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.benchmarks.mixed_load import MixedLoad
from tests.support.containers import Containers, Load, references, running_containers

console = Console(highlight=False)

SERVICES = ("draft", "prefill", "decode", "redis", "router")
ACTS = ("kill", "pause", "restart", "cut")
PAUSED_SECONDS = 4.0
# What a process takes until it has been through everything once.
WARM_UP_SHARE = 0.3
# Read inside: nobody else reaches the port.
_SCRAPE = "import urllib.request; print(urllib.request.urlopen('http://127.0.0.1:9464/metrics').read().decode())"
_BLOCKS = re.compile(r'^outrider_kv_blocks\{.*outrider_state="(\w+)".*\} (\S+)$', re.MULTILINE)


@dataclass
class Soak:
    """`memory`: bytes of each container that are its own, by when; `blocks`: owned ones while nothing runs."""

    containers: Containers
    load: Load
    mixed: MixedLoad
    rng: random.Random
    began: float = field(default_factory=time.monotonic)
    faults: Counter[str] = field(default_factory=Counter)
    # Services that have had a fault and are not well again.
    coming_back: set[str] = field(default_factory=set)
    # A container that was killed or restarted begins anew: by its name and the start of its process.
    memory: dict[tuple[str, str], list[tuple[float, int]]] = field(default_factory=lambda: defaultdict(list))

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    async def run(self, seconds: float, every: float) -> None:
        """Faults under load. Raises AssertionError for a stream that came out otherwise, or an unexplained error."""
        async with self.load.running(), self.mixed.running(), asyncio.TaskGroup() as returns:
            for number in range(round(seconds / every)):
                await asyncio.sleep(number * every - self.seconds)
                # One that is still coming back has had its fault.
                whole = [service for service in SERVICES if service not in self.coming_back]
                if whole:
                    service, act = self.rng.choice(whole), self.rng.choice(ACTS)
                    # A router's streams are its own.
                    self.load.forgiven |= service == "router"
                    await self._fault(service, act)
                    self.coming_back.add(service)
                    returns.create_task(self._until_back(service))
                    console.print(
                        f"{self.seconds:4.0f} s  {act} {service}: {self.load.num_streams} streams as they should be, "
                        f"{len(self.load.errors)} broken off with their router, {self.mixed.ends.total()} of all "
                        "kinds"
                    )
                await self._measure()
            await self.containers.until_healthy()
            # What was begun ends before anything is counted.
            await self.load.more(8)

    async def _until_back(self, service: str) -> None:
        await self.containers.until_healthy(service)
        await self.load.more(4)
        self.load.forgiven &= service != "router"
        self.coming_back.remove(service)

    async def _fault(self, service: str, act: str) -> None:
        # Of two the first goes through it all in one life: what it gathers would show.
        container = self.containers.of(service)[0 if act in ("pause", "cut") else -1]
        self.faults[f"{act} {service}"] += 1
        match act:
            case "kill":
                await asyncio.to_thread(container.kill)
                await asyncio.to_thread(container.start)
            case "pause":
                await asyncio.to_thread(container.pause)
                await asyncio.sleep(PAUSED_SECONDS)
                await asyncio.to_thread(container.unpause)
            case "restart":
                await asyncio.to_thread(container.restart)
            case "cut":
                (network,) = [each for each in self.containers.engine.networks.list() if each.name.endswith("_inside")]
                await asyncio.to_thread(network.disconnect, container)
                await asyncio.sleep(PAUSED_SECONDS)
                aliases = [container.id[:12], service]
                await asyncio.to_thread(lambda: network.connect(container, aliases=aliases))

    async def _measure(self) -> None:
        for container in await asyncio.to_thread(self.containers.of):
            container.reload()
            statistics: dict[str, Any] = await asyncio.to_thread(container.stats, stream=False)
            # None of one that is just starting.
            details = statistics["memory_stats"].get("stats")
            if details is None:
                continue
            own = details.get("anon", details.get("total_rss", 0))
            self.memory[container.name, container.attrs["State"]["StartedAt"]].append((self.seconds, own))

    def longest_lives(self) -> dict[str, list[tuple[float, int]]]:
        """The memory of each container, over the longest that it was left alone."""
        longest: dict[str, list[tuple[float, int]]] = {}
        for (name, _), points in self.memory.items():
            if len(points) > len(longest.get(name, [])):
                longest[name] = points
        return longest

    def owned_blocks(self) -> dict[str, float]:
        """KV blocks that sequences own, by worker."""
        owned = {}
        for service in ("prefill", "decode", "draft"):
            for container in self.containers.of(service):
                text = container.exec_run(["python", "-c", _SCRAPE]).output.decode()
                owned[container.name] = dict(_BLOCKS.findall(text)).get("owned", "0")
        return {name: float(count) for name, count in owned.items()}


def _table(lives: Mapping[str, Sequence[tuple[float, int]]], owned: Mapping[str, float]) -> Table:
    """MiB at a third, two thirds and the end of each life, the slope behind its warm-up, and the blocks left."""
    table = Table("", "seconds", "MiB at 1/3", "2/3", "end", "MiB an hour", "owned blocks left", box=None)
    for name, points in sorted(lives.items()):
        start = points[0][0] + WARM_UP_SHARE * (points[-1][0] - points[0][0])
        slope = _slope([(at, value) for at, value in points if at >= start]) * 3600 / 2**20
        sizes = [f"{points[place][1] / 2**20:.0f}" for place in (len(points) // 3, 2 * len(points) // 3, -1)]
        seconds = f"{points[-1][0] - points[0][0]:.0f}"
        table.add_row(name, seconds, *sizes, f"{slope:+.0f}", f"{owned.get(name, 0):.0f}")
    return table


def _slope(points: Sequence[tuple[float, int]]) -> float:
    """Least squares."""
    mean_at, mean_value = fmean(at for at, _ in points), fmean(value for _, value in points)
    spread = sum((at - mean_at) ** 2 for at, _ in points)
    return sum((at - mean_at) * (value - mean_value) for at, value in points) / spread if spread else 0.0


async def _run(minutes: float, every: float, seed: int) -> bool:
    console.print("what a stack of child processes says")
    expected = await references()
    with tempfile.TemporaryDirectory() as folder:
        console.print("the container stack")
        async with running_containers(Path(folder)) as containers:
            load, rng = Load(containers, expected), random.Random(seed)
            soak = Soak(containers, load, MixedLoad(load, random.Random(seed)), rng)
            await soak.run(60 * minutes, every)
            deadline = time.monotonic() + 60
            while any((owned := soak.owned_blocks()).values()) and time.monotonic() < deadline:  # noqa: ASYNC110
                await asyncio.sleep(1.0)
            console.print(_table(soak.longest_lives(), owned))
    errors = Counter(code.name for code in soak.load.errors)
    console.print(
        f"{sum(soak.faults.values())} faults ({json.dumps(dict(sorted(soak.faults.items())))}): "
        f"{soak.load.num_streams} streams, every one as undisturbed, the longest in {soak.load.longest_seconds:.1f} s; "
        f"{sum(errors.values())} broken off while their router was away {dict(errors)}; "
        f"of all kinds {dict(soak.mixed.ends)}"
    )
    return not any(owned.values())


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=15.0, help="How long; default 15.")
    parser.add_argument("--every", type=float, default=20.0, help="Seconds from fault to fault; default 20.")
    parser.add_argument("--seed", type=int, default=1, help="Of the dice; default 1.")
    options = parser.parse_args()
    if not asyncio.run(_run(options.minutes, options.every, options.seed)):
        sys.exit("soak: blocks are left behind")


if __name__ == "__main__":
    main()
