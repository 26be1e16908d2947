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
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table

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
    rng: random.Random
    began: float = field(default_factory=time.monotonic)
    faults: Counter[str] = field(default_factory=Counter)
    # A container that was killed or restarted begins anew: by its name and the start of its process.
    memory: dict[tuple[str, str], list[tuple[float, int]]] = field(default_factory=lambda: defaultdict(list))

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    async def run(self, seconds: float, every: float) -> None:
        """Faults under load. Raises AssertionError for a stream that came out otherwise, or an unexplained error."""
        async with self.load.running():
            while self.seconds < seconds:
                due = self.seconds + every
                service, act = self.rng.choice(SERVICES), self.rng.choice(ACTS)
                await self._fault(service, act)
                await self.load.more(4)
                await self._measure()
                console.print(
                    f"{self.seconds:4.0f} s  {act} {service}: {self.load.num_streams} streams as they should be, "
                    f"{len(self.load.errors)} broken off with their router"
                )
                await asyncio.sleep(max(0.0, due - self.seconds))
            # What was begun ends before anything is counted.
            await self.load.more(8)

    async def _fault(self, service: str, act: str) -> None:
        container = self.rng.choice(self.containers.of(service))
        self.faults[f"{act} {service}"] += 1
        # A router's streams are its own.
        self.load.forgiven = service == "router"
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
        await self.containers.until_healthy()
        if service == "router":
            await self.load.more(2)
            self.load.forgiven = False

    async def _measure(self) -> None:
        for container in await asyncio.to_thread(self.containers.of):
            container.reload()
            statistics: dict[str, Any] = await asyncio.to_thread(container.stats, stream=False)
            details = statistics["memory_stats"]["stats"]
            own = details.get("anon", details.get("total_rss", 0))
            self.memory[container.name, container.attrs["State"]["StartedAt"]].append((self.seconds, own))

    def slopes(self) -> dict[str, tuple[float, float, float]]:
        """Of each container's longest life: MiB at its end, MiB an hour behind its warm-up, and how long that is."""
        longest: dict[str, list[tuple[float, int]]] = {}
        for (name, _), points in self.memory.items():
            if len(points) > len(longest.get(name, [])):
                longest[name] = points
        found = {}
        for name, points in longest.items():
            start = points[0][0] + WARM_UP_SHARE * (points[-1][0] - points[0][0])
            settled = [(at, value) for at, value in points if at >= start]
            slope = _slope(settled) * 3600 / 2**20 if len(settled) > 2 else 0.0
            found[name] = points[-1][1] / 2**20, slope, settled[-1][0] - settled[0][0]
        return found

    def owned_blocks(self) -> dict[str, float]:
        """KV blocks that sequences own, by worker."""
        owned = {}
        for service in ("prefill", "decode", "draft"):
            for container in self.containers.of(service):
                text = container.exec_run(["python", "-c", _SCRAPE]).output.decode()
                owned[container.name] = dict(_BLOCKS.findall(text)).get("owned", "0")
        return {name: float(count) for name, count in owned.items()}


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
            soak = Soak(containers, Load(containers, expected), random.Random(seed))
            await soak.run(60 * minutes, every)
            deadline = time.monotonic() + 60
            while any((owned := soak.owned_blocks()).values()) and time.monotonic() < deadline:  # noqa: ASYNC110
                await asyncio.sleep(1.0)
            table = Table("", "MiB", "MiB an hour", "over seconds", "owned blocks left", box=None)
            for name, (size, slope, seconds) in sorted(soak.slopes().items()):
                table.add_row(name, f"{size:.0f}", f"{slope:+.1f}", f"{seconds:.0f}", f"{owned.get(name, 0):.0f}")
            console.print(table)
    errors = Counter(code.name for code in soak.load.errors)
    console.print(
        f"{sum(soak.faults.values())} faults ({json.dumps(dict(sorted(soak.faults.items())))}): "
        f"{soak.load.num_streams} streams, every one as undisturbed, the longest in {soak.load.longest_seconds:.1f} s; "
        f"{sum(errors.values())} broken off while their router was away {dict(errors)}"
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
