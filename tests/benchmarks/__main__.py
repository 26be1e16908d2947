"""`make bench`: measures, prints two tables for each pair, and writes every number as JSON.

python -m tests.benchmarks --pair demo --streams 1 8 --repeats 1
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from shared.settings import StartupError
from tests.benchmarks.errors import BenchmarkError
from tests.benchmarks.machine import this_machine
from tests.benchmarks.measurement import PairResult, Plan, measure_pair
from tests.benchmarks.model_pair import PAIR_NAMES, load_pair
from tests.benchmarks.report import legend, render, summarize, to_json


def main() -> None:
    """Exit status 1, with one line on stderr, if anything failed; the numbers themselves fail nothing."""
    options = _parse_options()
    plan = Plan(tuple(options.streams), options.repeats, options.num_tokens, options.inside)
    names = PAIR_NAMES if options.pair == "both" else (options.pair,)
    machine = this_machine()
    results, summaries = [], []
    try:
        for name in names:
            results.append(_measure(name, plan))
            summaries.append(summarize(results[-1], plan.streams))
            Console().print(render(summaries[-1]))  # at once: what was measured outlives a run broken off
    except (BenchmarkError, StartupError) as error:
        sys.exit(f"bench: {error}")
    Console().print(legend(plan, machine))
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(to_json(results, summaries, plan, machine), indent=2) + "\n")
    print(f"Every number: {options.json}")


def _measure(name: str, plan: Plan) -> PairResult:
    """Measures one pair with progress on stderr. Raises as `measure_pair` does."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(f"{name} pair: loading", total=plan.num_steps)

        def on_step(step: str) -> None:
            progress.update(task, description=f"{name} pair: {step}", advance=1)
            if not progress.console.is_terminal:  # where no bar moves, lines tell
                progress.console.print(f"{name} pair: {step}")

        return asyncio.run(measure_pair(load_pair(name), plan, on_step))


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pair", choices=(*PAIR_NAMES, "both"), default="both", help="Which models; default both.")
    parser.add_argument(
        "--streams", type=_positive, nargs="+", default=[1, 8, 32], help="Concurrent streams; default 1 8 32."
    )
    parser.add_argument("--repeats", type=_positive, default=3, help="Medians are over this many; default 3.")
    parser.add_argument("--num-tokens", type=_positive, default=128, help="Output tokens a stream; default 128.")
    parser.add_argument("--inside", action="store_true", help="The draft model inside the target worker.")
    parser.add_argument(
        "--json", type=Path, default=Path("build/bench.json"), help="Where every number goes; default build/bench.json."
    )
    options = parser.parse_args()
    if len(set(options.streams)) < len(options.streams):
        parser.error("argument --streams: each number once")
    return options


def _positive(value: str) -> int:
    number = int(value)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {number}")
    return number


if __name__ == "__main__":
    main()
