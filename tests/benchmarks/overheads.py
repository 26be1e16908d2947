"""`make bench-overheads`: what encryption and the metrics page cost, in throughput.

Stacks that differ in one thing alone run side by side and take turns at short loads of the same prompts; one more,
which differs in nothing, says how far the measurement itself is off.

python -m tests.benchmarks.overheads --streams 8 32 --stacks 4 --turns 40
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import urllib.request
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from statistics import fmean, stdev
from typing import NamedTuple

from outrider.v1 import inference_pb2_grpc
from rich.console import Console
from rich.table import Table

from services.cli.certs import write_certificates
from services.cli.ports import free_ports
from services.cli.stack import LOOPBACK, Stack, StackSettings, router_identity
from shared.policy.shape import Shape
from shared.registry.keys import DEFAULT_DEPLOYMENT
from shared.rpc.channel import connect
from shared.settings import StartupError
from tests.benchmarks.cpu_time import cpu_seconds
from tests.benchmarks.errors import BenchmarkError
from tests.benchmarks.load import OFF, Mode, run_load
from tests.benchmarks.measurement import PROMPT_TOKENS, check_undisturbed
from tests.benchmarks.model_pair import PAIR_NAMES, Pair, load_pair
from tests.support.service import MODEL_ALONE

console = Console(highlight=False)

PLAIN = "plain"
# A fixed γ beside none: a round sends more messages for its tokens, and an adaptive one would differ by luck.
MODES = {"off": OFF, "γ = 3": Mode(True, Shape(3))}
# Of its own time under load; three times as often as our configurations say.
_READ_EVERY_SECONDS = 5.0
_WARM_UPS = 3
_NUM_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Variant:
    """A stack that differs from the plain one. `metrics`: every service has its page, and it is read."""

    certs: Path | None = None
    metrics: bool = False


class Speed(NamedTuple):
    """Tokens a second, and a second of CPU time of all services: where they keep all cores busy the second says the
    same as the first, and chance has less of a say."""

    tokens_per_second: float
    tokens_per_cpu_second: float


@dataclass(slots=True)
class Served:
    """A stack, a client of it, and the ports of its metrics pages, which are read in its own turns."""

    stack: Stack
    stub: inference_pb2_grpc.InferenceAsyncStub
    pages: Sequence[int]
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    tokens: int = 0
    unread_seconds: float = 0.0

    def begin(self) -> None:
        """Counts from here on."""
        self.seconds = self.cpu_seconds = 0.0
        self.tokens = 0

    @property
    def speed(self) -> Speed:
        return Speed(self.tokens / self.seconds, self.tokens / self.cpu_seconds)

    async def take_turn(self, prompts: Sequence[list[int]], mode: Mode) -> None:
        reader = asyncio.create_task(_read(self.pages if self.unread_seconds >= _READ_EVERY_SECONDS else ()))
        began = self._cpu_seconds_so_far()
        load = await run_load(self.stub, prompts, _NUM_TOKENS, mode)
        if self.unread_seconds >= _READ_EVERY_SECONDS:
            self.unread_seconds -= _READ_EVERY_SECONDS
        await reader
        self.cpu_seconds += self._cpu_seconds_so_far() - began
        self.unread_seconds += load.seconds
        self.seconds += load.seconds
        self.tokens += load.output_tokens

    def _cpu_seconds_so_far(self) -> float:
        return sum(cpu_seconds(process.pid) for process in self.stack.processes.values() if process.pid is not None)


Speeds = Mapping[tuple[str, int, str], Sequence[Mapping[str, Speed]]]
"""By pair, streams and mode: of each set of stacks, how fast each variant was."""


async def _measure(pair: Pair, variants: Mapping[str, Variant], streams: int, sets: int, turns: int) -> Speeds:
    """Each set of stacks is of new processes: what one happens to be, as its memory lies, is not what differs."""
    speeds: dict[tuple[str, int, str], list[Mapping[str, Speed]]] = defaultdict(list)
    for number in range(sets):
        console.print(f"{pair.name} pair, {streams} streams, stacks {number + 1} of {sets}")
        async with AsyncExitStack() as running:
            names = list(variants)[number % len(variants) :] + list(variants)[: number % len(variants)]
            stacks = {name: await running.enter_async_context(_serving(pair, variants[name])) for name in names}
            for mode_name, mode in MODES.items():
                for turn in range(-_WARM_UPS, turns):
                    if turn == 0:
                        for served in stacks.values():
                            served.begin()
                    prompts = [pair.prompts(PROMPT_TOKENS) for _ in range(streams)]
                    for name in names if turn % 2 else names[::-1]:
                        await stacks[name].take_turn(prompts, mode)
                measured = {name: served.speed for name, served in stacks.items()}
                ratios = ", ".join(
                    f"{name} {measured[name].tokens_per_second / measured[PLAIN].tokens_per_second:.3f}"
                    for name in variants
                )
                console.print(f"  {mode_name}: {ratios}")
                speeds[pair.name, streams, mode_name].append(measured)
    return speeds


@asynccontextmanager
async def _serving(pair: Pair, variant: Variant) -> AsyncIterator[Served]:
    """A stack as the variant says."""
    names = ("router", "target-0", "draft")
    ports = dict(zip(names, free_ports(LOOPBACK, len(names)), strict=True)) if variant.metrics else {}
    environment = {
        name: {f"OUTRIDER_{name.partition('-')[0].upper()}_METRICS_PORT": str(port)} for name, port in ports.items()
    }
    environment["draft"] = environment.get("draft", {}) | MODEL_ALONE
    settings = StackSettings(
        target=str(pair.target),
        draft=str(pair.draft),
        port=0,
        dtype="bfloat16",
        certs=variant.certs,
        environment=environment,
    )
    async with Stack(settings) as stack:
        channel = (
            connect(stack.router_address)
            if variant.certs is None
            else router_identity(variant.certs).connect(stack.router_address, "router")
        )
        async with channel:
            yield Served(stack, inference_pb2_grpc.InferenceStub(channel), list(ports.values()))
        check_undisturbed(stack)


async def _read(pages: Sequence[int]) -> None:
    for port in pages:
        await asyncio.to_thread(lambda url: urllib.request.urlopen(url).read(), f"http://{LOOPBACK}:{port}/metrics")


def table(speeds: Speeds, variants: Sequence[str]) -> Table:
    """Both speeds over the plain stack's: the mean over sets of stacks, and its standard error."""
    made = Table("pair", "streams", "", "tokens", "plain", *[f"{name} / plain" for name in variants], box=None)
    for (pair, streams, mode), sets in speeds.items():
        for per, field in (("a second", "tokens_per_second"), ("a CPU second", "tokens_per_cpu_second")):
            plain = [getattr(each[PLAIN], field) for each in sets]
            cells = []
            for name in variants:
                ratios = [getattr(each[name], field) / base for each, base in zip(sets, plain, strict=True)]
                error = stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else float("nan")
                cells.append(f"{fmean(ratios):.3f} ± {error:.3f}")
            made.add_row(pair, str(streams), mode, per, f"{fmean(plain):.0f}", *cells)
    return made


async def _run(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_certificates(Path(folder), DEFAULT_DEPLOYMENT, ["localhost", LOOPBACK], timedelta(days=1))
        variants = {
            PLAIN: Variant(),
            "the same": Variant(),
            "mutual TLS": Variant(certs=Path(folder)),
            "metrics": Variant(metrics=True),
        }
        speeds: dict[tuple[str, int, str], Sequence[Mapping[str, Speed]]] = {}
        for name in options.pair:
            for streams in options.streams:
                speeds |= await _measure(load_pair(name), variants, streams, options.stacks, options.turns)
    console.print(table(speeds, [name for name in variants if name != PLAIN]))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.overheads", description=__doc__)
    parser.add_argument("--pair", nargs="+", choices=PAIR_NAMES, default=["demo"], help="Which models; default demo.")
    parser.add_argument("--streams", type=int, nargs="+", default=[8, 32], help="Concurrent streams; default 8 32.")
    parser.add_argument("--stacks", type=int, default=4, help="Sets of stacks, of new processes each; default 4.")
    parser.add_argument("--turns", type=int, default=30, help="Loads on each of a set; default 30.")
    options = parser.parse_args()
    try:
        asyncio.run(_run(options))
    except (BenchmarkError, StartupError) as error:
        sys.exit(f"bench: {error}")


if __name__ == "__main__":
    main()
