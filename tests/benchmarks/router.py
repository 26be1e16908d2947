"""`make bench-router`: what the router takes of a core, by request, token and round, and so how many tokens a second.

CPU time of its process alone, of loads that differ in nothing but how long their outputs are: what is the same for both
is the requests' own. The demo pair, whose steps are short, so that the router has much to do.

python -m tests.benchmarks.router --streams 1 8 32 --loads 12
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.v1 import inference_pb2_grpc
from rich.console import Console
from rich.table import Table

from services.cli.stack import Stack, StackSettings
from shared.policy.shape import Shape
from shared.settings import StartupError
from tests.benchmarks.cpu_time import cpu_seconds
from tests.benchmarks.errors import BenchmarkError
from tests.benchmarks.load import OFF, Mode, run_load
from tests.benchmarks.machine import this_machine
from tests.benchmarks.measurement import PROMPT_TOKENS, check_undisturbed
from tests.benchmarks.model_pair import PAIR_NAMES, Pair, load_pair
from tests.support.service import COPYING_NOTHING, MODEL_ALONE, inference

# Outputs of both lengths, of which the difference is what tokens take.
_SHORT, _LONG = 16, 144
_ROUNDS = Mode(True, Shape(4))
_WARM_UPS = 2


@dataclass(frozen=True, slots=True)
class Taken:
    """What loads of one kind took of the router, and brought; `rounds` are counted where there are any."""

    cpu_seconds: float = 0.0
    requests: int = 0
    tokens: int = 0
    rounds: int = 0

    def __add__(self, other: Taken) -> Taken:
        return Taken(
            self.cpu_seconds + other.cpu_seconds,
            self.requests + other.requests,
            self.tokens + other.tokens,
            self.rounds + other.rounds,
        )


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of a core: of a request beside its output, of a token, and of a round, None where there are none."""

    request: float
    token: float
    round: float | None


def costs_of(short: Taken, long: Taken) -> Costs:
    """Of as many requests each. Raises BenchmarkError where the longer took no more, or the shorter less than its
    tokens alone, as too few were measured."""
    seconds, tokens = long.cpu_seconds - short.cpu_seconds, long.tokens - short.tokens
    if short.requests != long.requests or seconds <= 0 or tokens <= 0:
        raise BenchmarkError("the router took no more for more tokens: measure more loads")
    token = seconds / tokens
    request = (short.cpu_seconds - token * short.tokens) / short.requests
    if request < 0:
        raise BenchmarkError("the router took less than nothing for requests beside their tokens: measure more loads")
    rounds = long.rounds - short.rounds
    return Costs(request, token, seconds / rounds if rounds > 0 else None)


async def _measure(pair: Pair, streams: Sequence[int], loads: int, console: Console) -> dict[int, tuple[Costs, Costs]]:
    """By streams, without drafts and with."""
    environment = {"draft": MODEL_ALONE, "target-0": COPYING_NOTHING}
    settings = StackSettings(
        target=str(pair.target), draft=str(pair.draft), port=0, dtype="bfloat16", environment=environment
    )
    found = {}
    with console.status("starting the services") as status:
        async with Stack(settings) as stack, inference(stack) as stub:
            for count in streams:
                costs = []
                for mode, what in ((OFF, "plain"), (_ROUNDS, "rounds of four draft tokens")):
                    status.update(f"{count} streams, {what}")
                    short, long = Taken(), Taken()
                    for number in range(_WARM_UPS + loads):
                        taken = [await _take(stack, stub, pair, count, tokens, mode) for tokens in (_SHORT, _LONG)]
                        if number >= _WARM_UPS:
                            short, long = short + taken[0], long + taken[1]
                    costs.append(costs_of(short, long))
                found[count] = costs[0], costs[1]
            check_undisturbed(stack)
    return found


async def _take(
    stack: Stack, stub: inference_pb2_grpc.InferenceAsyncStub, pair: Pair, streams: int, num_tokens: int, mode: Mode
) -> Taken:
    pid = stack.processes["router"].pid
    if pid is None:
        raise BenchmarkError("the router is not running")
    prompts = [pair.prompts(PROMPT_TOKENS) for _ in range(streams)]
    began = cpu_seconds(pid)
    load = await run_load(stub, prompts, num_tokens, mode)
    return Taken(cpu_seconds(pid) - began, streams, load.output_tokens, load.rounds)


def _shown(found: dict[int, tuple[Costs, Costs]], title: str) -> Table:
    table = Table(title=title)
    for heading in ("streams", "request, ms", "token, µs", "a core: tokens/s", "round, µs", "token, µs", "tokens/s"):
        table.add_column(heading, justify="right")
    for streams, (plain, drafted) in found.items():
        round_cell = "-" if drafted.round is None else f"{drafted.round * 1e6:.0f}"
        table.add_row(
            str(streams),
            f"{plain.request * 1e3:.1f}",
            f"{plain.token * 1e6:.0f}",
            f"{1 / plain.token:,.0f}",
            round_cell,
            f"{drafted.token * 1e6:.0f}",
            f"{1 / drafted.token:,.0f}",
        )
    return table


def main() -> None:
    """Exit status 1, with one line on stderr, if anything failed."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.router",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--pair", choices=PAIR_NAMES, default="demo", help="Which models; default demo.")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32], help="Concurrent ones; default 1 8 32.")
    parser.add_argument("--loads", type=int, default=12, help="Of each length at each number of streams; default 12.")
    options = parser.parse_args()
    console = Console(stderr=True, highlight=False)
    try:
        found = asyncio.run(_measure(load_pair(options.pair), options.streams, options.loads, console))
    except (BenchmarkError, StartupError) as error:
        sys.exit(f"bench-router: {error}")
    console = Console()
    console.print(_shown(found, f"{options.pair} pair: what the router takes of a core"))
    console.print(str(this_machine()), highlight=False)


if __name__ == "__main__":
    main()
