"""`make bench-gpu`: what a CUDA device makes of a target's steps, beside what its memory allows.

Plain decoding of models in the shapes of 8 and 1 billion parameters, with random weights: as transformers' layers over
PyTorch's attention, by kernels of our own, and by these captured as graphs; and attention alone, for one to 16 queries
at contexts from 1,000 to 128,000. Where there is no such device it says so, and measures nothing.

python -m tests.benchmarks.gpu --shapes 1B
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, LlamaConfig

from shared.engine.attention.batch import AttentionBatch
from shared.engine.attention.paged import attend
from shared.engine.cuda.kernels import load_triton
from shared.engine.kv_pool import KVPool, KVShape
from shared.engine.model import CausalLM
from shared.engine.runner import ModelRunner
from shared.engine.self_test import self_test, try_captured

_BLOCK_SIZE = 16
_CONTEXT = 1024
_COPIED_BYTES = 1 << 31
_WARM_UPS, _REPEATS = 10, 50

_QUERIES = (1, 2, 4, 8, 16)
_CONTEXTS = (1024, 8192, 32768, 131072)
_ATTENTION = KVShape(num_layers=1, num_kv_heads=8, key_head_dim=128, value_head_dim=128)
_NUM_HEADS = 32


class Shape(NamedTuple):
    hidden: int
    layers: int
    heads: int
    mlp: int
    tied: bool

    def config(self) -> LlamaConfig:
        return LlamaConfig(
            hidden_size=self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=8,
            intermediate_size=self.mlp,
            vocab_size=128_256,
            max_position_embeddings=8192,
            tie_word_embeddings=self.tied,
            eos_token_id=None,
            bos_token_id=None,
        )


SHAPES = {"8B": Shape(4096, 32, 32, 14336, False), "1B": Shape(2048, 16, 32, 8192, True)}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", choices=SHAPES, nargs="+", default=list(SHAPES), help="Of models; default both.")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("There is no CUDA device here: what GPUs make of it is not measured.")
        return
    device = torch.device("cuda")
    console = Console()
    bytes_a_second = _copy_bandwidth(device)
    console.print(f"{torch.cuda.get_device_name(device)}: a large copy reaches {bytes_a_second / 1e9:.0f} GB/s")
    for name in options.shapes:
        console.print(_decoding(name, device, bytes_a_second))
    console.print(_attention(device, bytes_a_second))


def _seconds(run: Callable[[], object]) -> float:
    """Of the device, the median of many."""
    for _ in range(_WARM_UPS):
        run()
    found: list[float] = []
    for _ in range(_REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        run()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) / 1e3)
    return median(found)


def _copy_bandwidth(device: torch.device) -> float:
    """Bytes a second, read and written."""
    source = torch.zeros(_COPIED_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * _COPIED_BYTES / _seconds(lambda: target.copy_(source))


def _decoding(name: str, device: torch.device, bytes_a_second: float) -> Table:
    """One sequence, a token at a time, behind `_CONTEXT` others."""
    table = Table(title=f"{name}, bf16, one sequence behind {_CONTEXT:,} tokens")
    for column in ("", "ms a step", "tokens a second", "share of the copy's bandwidth"):
        table.add_column(column, justify="right" if column else "left")
    with torch.device(device):
        whole: Any = AutoModelForCausalLM.from_config(SHAPES[name].config(), dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    num_bytes = sum(weight.nbytes for weight in whole.parameters())
    if not SHAPES[name].tied:
        num_bytes -= whole.get_input_embeddings().weight.nbytes  # read by the row
    num_blocks = -(-_CONTEXT // _BLOCK_SIZE) + 2
    blocks = list(range(num_blocks - 1))
    for way in ("transformers' layers, PyTorch's attention", "kernels of our own", "captured"):
        model = CausalLM(whole, name, "off" if way.startswith("transformers") else "auto")
        runner = ModelRunner(model, KVPool(model.kv_shape, num_blocks, _BLOCK_SIZE, model.dtype, device))
        self_test(model, runner)
        if way == "captured":
            try_captured(model, runner, num_blocks - 1)
        runner.pool.data.normal_()
        seconds = _seconds(lambda runner=runner: runner.run_packed([5], [_CONTEXT], [1], [blocks], [0]))  # type: ignore[misc]
        read = num_bytes + _CONTEXT * model.num_layers * runner.pool.position_bytes
        table.add_row(way, f"{seconds * 1e3:.2f}", f"{1 / seconds:.0f}", f"{read / seconds / bytes_a_second:.0%}")
    return table


def _attention(device: torch.device, bytes_a_second: float) -> Table:
    """One layer of one sequence, whose last tokens are the queries."""
    table = Table(title="attention of one layer, 32 heads of 128 over 8: µs, and over what reading the KV takes")
    table.add_column("queries")
    for context in _CONTEXTS:
        table.add_column(f"{context:,}", justify="right")
    num_blocks = -(-max(_CONTEXTS) // _BLOCK_SIZE)
    pool = KVPool(_ATTENTION, num_blocks, _BLOCK_SIZE, torch.bfloat16, device)
    pool.data.normal_()
    blocks = list(range(num_blocks))
    for num_queries in _QUERIES:
        cells = []
        for context in _CONTEXTS:
            batch = AttentionBatch.build(pool, [context - num_queries], [num_queries], [blocks], load_triton())
            query = torch.randn(num_queries, _NUM_HEADS, 128, dtype=torch.bfloat16, device=device)
            new = torch.randn(num_queries, 8, 128, dtype=torch.bfloat16, device=device)
            seconds = _seconds(lambda q=query, new=new, batch=batch: attend(0, q, new, new, batch, 128**-0.5))  # type: ignore[misc]
            floor = context * pool.position_bytes / bytes_a_second
            cells.append(f"{seconds * 1e6:.0f} ({seconds / floor:.1f})")
        table.add_row(str(num_queries), *cells)
    return table


if __name__ == "__main__":
    main()
