"""`make bench-pools`: measures pools of target workers and what the simulator says of them; tables, and JSON.

python -m tests.benchmarks.pools --only a,d --repeats 3
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from shared.settings import StartupError
from tests.benchmarks.errors import BenchmarkError
from tests.benchmarks.machine import this_machine
from tests.benchmarks.measurement import OnStep
from tests.benchmarks.model_pair import Pair, load_pair
from tests.benchmarks.pools.bursts import measure_bursts
from tests.benchmarks.pools.goodput import measure_goodput
from tests.benchmarks.pools.interference import measure_interference
from tests.benchmarks.pools.prefixes import measure_prefixes
from tests.benchmarks.pools.report import render, to_json
from tests.benchmarks.pools.results import Results
from tests.benchmarks.pools.routing import measure_routing
from tests.benchmarks.pools.transfer import measure_transfers

_LEAST_WIDTH = 110
_LETTERS = "abcdef"
# Those that are simulated.
_SERVED = "adef"


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is measured: turns of transfers, prompts among streams, samples of each prefix, requests
    over shared prompts, seconds of load at each rate, bursts among streams."""

    transfers: int = 45
    prompts: int = 10
    samples: int = 3
    requests: int = 120
    seconds: float = 80.0
    bursts: int = 3


_FULL = Scale()
_QUICK = Scale(transfers=2, prompts=2, samples=1, requests=8, seconds=8.0, bursts=1)


def main() -> None:
    """Exit status 1, with one line on stderr, if anything failed; the numbers themselves fail nothing."""
    options = _parse_options()
    scale = _QUICK if options.quick else _FULL
    machine = this_machine()
    try:
        results = asyncio.run(_measure(options.only, options.repeats, scale, _tell()))
    except (BenchmarkError, StartupError) as error:
        sys.exit(f"bench-pools: {error}")
    chosen = {"only": options.only, "repeats": options.repeats, "quick": options.quick}
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(to_json(results, machine, chosen), indent=2) + "\n")
    # Tables are wider than what a pipe is taken for.
    console = Console()
    Console(width=max(console.width, _LEAST_WIDTH)).print(render(results, machine))
    print(f"Every number: {options.json}")


async def _measure(letters: str, repeats: int, scale: Scale, tell: OnStep) -> Results:
    """Raises StartupError if a service does not start, BenchmarkError if a measurement is void."""
    tell("the synthetic pair")
    pair = load_pair("synthetic")
    results = Results()
    if any(letter in letters for letter in "b" + _SERVED):
        tell("b: transfers")
        results.rates += await measure_transfers(scale.transfers * (repeats if "b" in letters else 1))
    for repeat in range(repeats):
        for letter in letters:
            which = letter if repeats == 1 else f"{letter}, repeat {repeat + 1} of {repeats}"
            await _measure_part(letter, repeat, pair, scale, results, _behind(f"{which}: ", tell))
    return results


async def _measure_part(letter: str, repeat: int, pair: Pair, scale: Scale, results: Results, on_step: OnStep) -> None:
    match letter:
        case "a":
            results.add_runs(letter, await measure_interference(pair, scale.prompts, on_step))
        case "c":
            results.samples += await measure_prefixes(pair, scale.samples, on_step)
        case "d":
            results.add_runs(letter, await measure_routing(pair, scale.requests, repeat, on_step))
        case "e":
            results.add_runs(letter, await measure_goodput(pair, scale.seconds, repeat, on_step))
        case "f":
            results.add_runs(letter, await measure_bursts(pair, scale.bursts, on_step))


def _behind(words: str, tell: OnStep) -> OnStep:
    return lambda step: tell(words + step)


def _tell() -> OnStep:
    console = Console(stderr=True, highlight=False)
    began = time.monotonic()
    return lambda step: console.print(f"{time.monotonic() - began:5.0f} s  {step}")


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.pools",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--only",
        type=_parts,
        default=",".join(_LETTERS),
        help="Parts, separated by commas: a long prompts among streams, b transfers, c prefixes, d routing, e goodput, "
        "f bursts among streams.",
    )
    parser.add_argument("--repeats", type=int, default=1, help="What is measured so often; default 1.")
    parser.add_argument("--quick", action="store_true", help="Little of everything: only to see that it works.")
    parser.add_argument(
        "--json",
        type=Path,
        default=Path("build/bench-pools.json"),
        help="Where every number goes; default build/bench-pools.json.",
    )
    options = parser.parse_args()
    if options.repeats < 1:
        parser.error("argument --repeats: must be at least 1")
    return options


def _parts(value: str) -> str:
    letters = [each.strip() for each in value.split(",")]
    if not set(letters) <= set(_LETTERS) or len(set(letters)) < len(letters):
        raise argparse.ArgumentTypeError(f"must be some of {', '.join(_LETTERS)}, each once")
    return "".join(letters)


if __name__ == "__main__":
    main()
