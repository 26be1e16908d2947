"""`make bench-steps`: what a step of each model takes, beside the least that memory and arithmetic allow.

Bandwidth is measured before and behind every step, and each step is held against its own: it wanders by a third within
a minute on machines that others share. Steps at whose two ends it was another do not count, and where memory had two
speeds, a cell has a line for each. Two threads, or as many as --num-threads says, one model at a time, and in a
worker's environment: its OpenMP, its huge pages.

python -m tests.benchmarks.steps --pair synthetic --native auto off --quantize int8 int4
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from services.cli.launcher import prepare_this_process
from shared.engine.kv_pool import KVPool
from shared.engine.model import CausalLM
from shared.engine.native.library import load_library
from shared.engine.native.matrix import NativeMatrix
from shared.engine.quantised_weight import GROUP
from shared.engine.runner import ModelRunner
from shared.engine.self_test import self_test
from shared.engine.settings import Native, Quantize
from shared.settings import StartupError
from tests.benchmarks.errors import BenchmarkError
from tests.benchmarks.machine import this_machine
from tests.benchmarks.model_pair import PAIR_NAMES, load_pair

_BLOCK_SIZE = 16
# So many times what caches hold that they do not show: of four times as much a tenth came from them.
_STREAMED_BYTES = 1 << 29
# A product large enough for its arithmetic to be all that it takes.
_PRODUCT = (512, 2048, 2048)
# A size that takes longer than this is measured no more often than it must be.
_SECONDS_EACH = 6.0
_LEAST_TURNS = 3
# For each turn that is to count so many are tried at most.
_MOST_TRIES = 4
# Memory that is so many times as fast is another memory: what it gives at one speed scatters by a tenth.
_OTHER_SPEED = 1.25
# What a weight of a layer takes; in 4 bits, with its share of a scale.
_WEIGHT_BYTES: dict[Quantize, float] = {"none": 2, "int8": 1, "int4": 0.5 + 4 / GROUP}


class Size(NamedTuple):
    """`sequences` that each compute `queries` tokens behind `context` others."""

    sequences: int
    queries: int
    context: int

    @property
    def rows(self) -> int:
        return self.sequences * self.queries

    @property
    def positions(self) -> int:
        """Pairs of a query and a position that it sees."""
        return self.sequences * sum(self.context + i + 1 for i in range(self.queries))

    def __str__(self) -> str:
        what = "decode" if self.queries == 1 else "verify" if self.queries <= 16 else "prompt"
        return f"{self.sequences} × {what} {self.queries}" if self.queries > 1 else f"{self.sequences} × {what}"


SIZES = (
    Size(1, 1, 192),
    Size(1, 5, 192),
    Size(1, 9, 192),
    Size(1, 1, 4000),
    Size(8, 1, 192),
    Size(32, 1, 192),
    Size(64, 1, 192),
    Size(1, 512, 0),
)


class Measured(NamedTuple):
    """A step, or medians over turns: bytes a second of memory meanwhile, seconds, its floor's, and their ratio."""

    rate: float
    seconds: float
    floor: float
    ratio: float

    def __str__(self) -> str:
        return f"{self.seconds * 1e3:.1f} / {self.floor * 1e3:.1f} = {self.ratio:.2f} at {self.rate / 1e9:.0f}"


class Model:
    """A model ready to run steps of these sizes, and what they cannot do without."""

    def __init__(self, model: CausalLM, quantize: Quantize, sizes: Sequence[Size]) -> None:
        """Raises StartupError."""
        self.model = model
        self._weight_bytes = _WEIGHT_BYTES[quantize]
        matrices = {id(each): each for each in self.model._model.parameters() if each.dim() > 1}
        whole: Any = self.model._model
        embedding, head = whole.get_input_embeddings(), whole.get_output_embeddings()
        if embedding.weight is not head.weight:
            del matrices[id(embedding.weight)]  # read by the row
        self._num_weights = sum(each.numel() for each in matrices.values())
        self._num_head_weights: int = head.weight.numel()
        num_blocks = max(size.sequences * -(-(size.context + size.queries) // _BLOCK_SIZE) for size in sizes)
        self._runner = ModelRunner(
            self.model, KVPool(self.model.kv_shape, num_blocks, _BLOCK_SIZE, self.model.dtype, self.model.device)
        )
        self_test(self.model, self._runner)
        self._runner.pool.data.normal_()

    def fits(self, size: Size) -> bool:
        return size.context + size.queries <= self.model.max_context

    def run(self, size: Size) -> None:
        num_blocks = -(-(size.context + size.queries) // _BLOCK_SIZE)
        tables = [list(range(i * num_blocks, (i + 1) * num_blocks)) for i in range(size.sequences)]
        # Of a prompt, the last position's logits are wanted; of what is verified, all.
        rows = range(size.rows) if size.queries <= 16 else [size.rows - 1]
        starts, lengths = [size.context] * size.sequences, [size.queries] * size.sequences
        self._runner.run_packed([5] * size.rows, starts, lengths, tables, rows)

    def num_bytes(self, size: Size) -> int:
        """Weights once, and everybody's keys and values."""
        shape = self.model.kv_shape
        positions = size.sequences * (size.context + size.queries)
        weights = 2 * self._num_head_weights + self._weight_bytes * (self._num_weights - self._num_head_weights)
        return int(weights) + positions * shape.num_layers * self._runner.pool.position_bytes

    def num_flops(self, size: Size) -> int:
        shape = self.model.kv_shape
        num_logits = size.rows if size.queries <= 16 else 1
        products = 2 * (size.rows * (self._num_weights - self._num_head_weights) + num_logits * self._num_head_weights)
        heads = self.model.attention[0].num_heads
        return products + 4 * size.positions * heads * shape.head_dim * shape.num_layers


def _seconds(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def bandwidth(memory: torch.Tensor) -> float:
    """Bytes a second of reading `memory` from end to end, the better of two."""
    return memory.nbytes / min(_seconds(memory.sum) for _ in range(2))


def peak_flops() -> float:
    """Floating-point operations a second of a large product, in the best of the ways this machine has."""
    rows, inputs, outputs = _PRODUCT
    runs: list[Callable[[], object]] = []
    for dtype in (torch.bfloat16, torch.float32):
        x, weight = torch.randn(rows, inputs, dtype=dtype), torch.randn(outputs, inputs, dtype=dtype)
        runs.append(lambda x=x, weight=weight: torch.nn.functional.linear(x, weight))  # type: ignore[misc]
    if (library := load_library()) is not None:
        matrix = NativeMatrix(library, [torch.randn(outputs, inputs).bfloat16()], [None])
        narrow = torch.randn(rows, inputs).bfloat16()
        runs.append(lambda: matrix.product(narrow))
    return 2 * rows * inputs * outputs / min(_seconds(run) for run in runs for _ in range(3))


def measure(model: Model, size: Size, turns: int) -> list[Measured]:
    """At each speed that memory had, the slower first: mostly one. Raises BenchmarkError if it had hardly any for as
    long as a step takes."""
    memory = torch.ones(_STREAMED_BYTES // 4)
    peak = peak_flops()
    model.run(size)
    found: list[Measured] = []
    began = time.perf_counter()
    for _ in range(_MOST_TRIES * turns):
        if len(found) >= min(turns, _LEAST_TURNS) and time.perf_counter() - began > _SECONDS_EACH:
            break
        before = bandwidth(memory)
        seconds = _seconds(lambda: model.run(size))
        after = bandwidth(memory)
        rate = max(before, after)
        if rate < _OTHER_SPEED * min(before, after):
            floor = max(model.num_bytes(size) / rate, model.num_flops(size) / peak)
            found.append(Measured(rate, seconds, floor, seconds / floor))
        if len(found) == turns:
            break
    if len(found) < min(turns, _LEAST_TURNS):
        raise BenchmarkError(f"memory was faster or slower behind nearly every step: {size} behind {size.context}")
    return by_speed(found)


def by_speed(turns: Sequence[Measured]) -> list[Measured]:
    """Medians at each speed that memory had in at least three of them, or in most, the slower first."""
    groups = _speeds(sorted(turns))
    often = [each for each in groups if len(each) >= _LEAST_TURNS] or [max(groups, key=len)]
    return [_median(each) for each in often]


def _speeds(turns: Sequence[Measured]) -> list[Sequence[Measured]]:
    """Turns by increasing rate, parted at the widest steps between rates as long as both sides are of other speeds."""
    if len(turns) < 2:
        return [turns]
    cut = max(range(1, len(turns)), key=lambda i: turns[i].rate / turns[i - 1].rate)
    slower, faster = turns[:cut], turns[cut:]
    if _median(faster).rate < _OTHER_SPEED * _median(slower).rate:
        return [turns]
    return [*_speeds(slower), *_speeds(faster)]


def _median(turns: Sequence[Measured]) -> Measured:
    return Measured(*(median(column) for column in zip(*turns, strict=True)))


def main() -> None:
    """Exit status 1, with one line on stderr, if a model cannot be had or measured."""
    options = _parse_options()
    torch.set_num_threads(options.num_threads)
    pair = load_pair(options.pair)
    table = Table(title=f"{options.pair} pair, bf16, {options.num_threads} threads: ms a step, over its floor, at GB/s")
    ways: list[tuple[Native, Quantize]] = [(native, "none") for native in options.native]
    ways += [("auto", quantize) for quantize in options.quantize]
    names = [f"--native {native}" if quantize == "none" else f"--quantize {quantize}" for native, quantize in ways]
    for heading in ("model", "step", "context", *names):
        table.add_column(heading, justify="left" if heading in ("model", "step") else "right")
    with Console(stderr=True).status("") as status:
        for name, source in (("target", pair.target), ("draft", pair.draft)):
            columns: list[dict[Size, list[Measured]]] = []
            for (native, quantize), way in zip(ways, names, strict=True):
                columns.append({})
                try:
                    model = Model(CausalLM.load(str(source), "cpu", "bfloat16", native, quantize), quantize, SIZES)
                    for size in filter(model.fits, SIZES):
                        status.update(f"{name}, {way}: {size} behind {size.context}")
                        columns[-1][size] = measure(model, size, options.turns)
                except (BenchmarkError, StartupError) as error:
                    sys.exit(f"bench-steps: {error}")
            for size in columns[0]:
                cells = ["\n".join(map(str, column[size])) for column in columns]
                table.add_row(name, str(size), f"{size.context:,}", *cells)
    console = Console()
    console.print(table)
    console.print(str(this_machine()), highlight=False)


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.steps",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--pair", choices=PAIR_NAMES, default="synthetic", help="Which models; default synthetic.")
    parser.add_argument(
        "--native", choices=("auto", "off"), nargs="+", default=["auto"], help="With which kernels; default auto."
    )
    parser.add_argument(
        "--quantize", choices=("int8", "int4"), nargs="+", default=[], help="And with weights rounded to these."
    )
    parser.add_argument("--turns", type=int, default=25, help="Medians are over this many; default 25.")
    parser.add_argument("--num-threads", type=int, default=len(os.sched_getaffinity(0)), help="Default: one a core.")
    return parser.parse_args()


if __name__ == "__main__":
    prepare_this_process()
    main()
