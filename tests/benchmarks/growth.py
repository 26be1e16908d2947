"""`make bench-growth`: how what a step takes grows with sequences, contexts, vocabulary and the model's shape.

Random models as the target of the synthetic pair, each beside the least that memory and arithmetic allow, as in
`make bench-steps`. Two threads, or as many as --num-threads says.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace

import torch
from rich.console import Console
from rich.table import Table

from services.cli.launcher import prepare_this_process
from shared.engine.model import CausalLM
from shared.settings import StartupError
from tests.benchmarks.errors import BenchmarkError
from tests.benchmarks.machine import this_machine
from tests.benchmarks.steps import Model, Size, measure
from tests.benchmarks.synthetic_pair import PairShape, make_target

_SHAPE = PairShape()
_FEW = (Size(1, 1, 192), Size(1, 5, 192), Size(32, 1, 192))
_GROWTH: tuple[tuple[str, PairShape, Sequence[Size]], ...] = (
    ("sequences", _SHAPE, [Size(sequences, 1, 192) for sequences in (1, 2, 4, 8, 16, 32, 64)]),
    ("context", _SHAPE, [Size(1, 1, context) for context in (128, 512, 2048, 8000)]),
    ("context of eight", _SHAPE, [Size(8, 1, context) for context in (128, 512, 2048, 8000)]),
    ("vocabulary of 32,768", replace(_SHAPE, vocab=32768), _FEW),
    ("vocabulary of 131,072", replace(_SHAPE, vocab=131072), _FEW),
    ("16 layers of 1,536", replace(_SHAPE, layers=16, hidden=1536, mlp=4096, heads=24, kv_heads=6), _FEW),
)


def main() -> None:
    """Exit status 1, with one line on stderr, if a model cannot be served or measured."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.growth",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--turns", type=int, default=9, help="Medians are over this many; default 9.")
    parser.add_argument("--num-threads", type=int, default=len(os.sched_getaffinity(0)), help="Default: one a core.")
    options = parser.parse_args()
    torch.set_num_threads(options.num_threads)
    table = Table(title=f"bf16, {options.num_threads} threads: ms a step, over its floor, at GB/s")
    for heading in ("what grows", "step", "context", "ms"):
        table.add_column(heading, justify="left" if heading in ("what grows", "step") else "right")
    with Console(stderr=True).status("") as status:
        for what, shape, sizes in _GROWTH:
            status.update(f"{what}: making the model")
            torch.manual_seed(shape.seed)
            try:
                model = Model(CausalLM(make_target(shape).bfloat16(), what, "auto"), "none", sizes)
            except StartupError as error:
                sys.exit(f"bench-growth: {error}")
            for size in sizes:
                status.update(f"{what}: {size} behind {size.context}")
                try:
                    found = measure(model, size, options.turns)
                except BenchmarkError as error:
                    sys.exit(f"bench-growth: {error}")
                shown = "\n".join(map(str, found))
                table.add_row(what, str(size), f"{size.context:,}", shown, end_section=size is sizes[-1])
    console = Console()
    console.print(table)
    console.print(str(this_machine()), highlight=False)


if __name__ == "__main__":
    prepare_this_process()
    main()
