"""`make bench-gpu`: what a CUDA device makes of a target's steps, beside what its memory allows.

Models in the shapes of 8 and 1 billion parameters, with random weights: plain decoding as transformers' layers over
PyTorch's attention, by kernels of our own, and by these captured as graphs; one to 256 sequences at a time; and rounds
of the two, with what they bring if so many draft tokens are accepted. And attention alone, for one to 16 queries at
contexts from 1,000 to 128,000. Where there is no such device it says so, and measures nothing.

python -m tests.benchmarks.gpu --shapes 1B
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from services.draft.draws import draw_ahead
from shared.engine.attention.batch import AttentionBatch
from shared.engine.attention.paged import attend
from shared.engine.cuda.graphs import CudaRecorder
from shared.engine.cuda.kernels import load_triton
from shared.engine.kv_pool import KVPool, KVShape
from shared.engine.model import CausalLM
from shared.engine.runner import ModelRunner
from shared.engine.self_test import self_test, try_captured
from shared.engine.sequence import Sequence as EngineSequence
from shared.engine.settings import Native
from shared.engine.step_plan import ScheduledSequence, StepPlan
from shared.policy.acceptance import expected_tokens
from shared.sampling.coupled import argmax
from shared.sampling.params import SamplingParams
from shared.sampling.rows import SampleRows

_BLOCK_SIZE = 16
_CONTEXT = 1024
_COPIED_BYTES = 1 << 31
_WARM_UPS, _REPEATS = 10, 50
_STREAMS = (1, 4, 16, 64, 256)
_STREAMS_CONTEXT = 256
_GAMMAS = (1, 2, 3, 4, 6, 8)
_ACCEPTANCE_RATES = (0.6, 0.75, 0.9)

_QUERIES = (1, 2, 4, 8, 16)
_CONTEXTS = (1024, 8192, 32768, 131072)
_ATTENTION = KVShape(num_layers=1, num_kv_heads=8, key_head_dim=128, value_head_dim=128)
_NUM_HEADS = 32
_LAYERS = 16


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
        console.print(_decoding(name, SHAPES[name], device, bytes_a_second))
        console.print(_streams(name, SHAPES[name], device, bytes_a_second))
    if len(options.shapes) == len(SHAPES):
        console.print(_rounds(SHAPES["8B"], SHAPES["1B"], device))
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


class _Served(NamedTuple):
    """`num_bytes`: of the weights that a step reads."""

    runner: ModelRunner
    num_bytes: int

    @property
    def bytes_a_position(self) -> int:
        return self.runner.model.num_layers * self.runner.pool.position_bytes


def _serve(
    name: str, shape: Shape, device: torch.device, num_blocks: int, captured: bool, native: Native = "auto"
) -> _Served:
    """One with random weights; a block more than these is nobody's."""
    gc.collect()  # of models before, which refer to themselves
    with torch.device(device):
        whole: Any = AutoModelForCausalLM.from_config(shape.config(), dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    num_bytes = sum(weight.nbytes for weight in whole.parameters())
    if not whole.config.tie_word_embeddings:
        num_bytes -= whole.get_input_embeddings().weight.nbytes  # read by the row
    model = CausalLM(whole, name, native)
    runner = ModelRunner(model, KVPool(model.kv_shape, num_blocks + 1, _BLOCK_SIZE, model.dtype, model.device))
    self_test(model, runner)
    if captured:
        try_captured(model, runner, num_blocks)
    runner.pool.data.normal_()
    return _Served(runner, num_bytes)


def _decoding(name: str, shape: Shape, device: torch.device, bytes_a_second: float) -> Table:
    """One sequence, a token at a time, behind `_CONTEXT` others."""
    table = Table(title=f"{name}, bf16, one sequence behind {_CONTEXT:,} tokens")
    for column in ("", "ms a step", "tokens a second", "share of the copy's bandwidth"):
        table.add_column(column, justify="right" if column else "left")
    blocks = _tables(1, _CONTEXT + 1)
    for way in ("transformers' layers, PyTorch's attention", "kernels of our own", "captured"):
        native: Native = "off" if way.startswith("transformers") else "auto"
        served = _serve(name, shape, device, len(blocks[0]), way == "captured", native)
        seconds = _seconds(lambda: served.runner.run_packed([5], [_CONTEXT], [1], blocks, [0]))  # noqa: B023
        read = served.num_bytes + _CONTEXT * served.bytes_a_position
        table.add_row(way, f"{seconds * 1e3:.2f}", f"{1 / seconds:.0f}", f"{read / seconds / bytes_a_second:.0%}")
    return table


def _streams(name: str, shape: Shape, device: torch.device, bytes_a_second: float) -> Table:
    """More and more sequences, a token each, behind `_STREAMS_CONTEXT` others; and how long a step keeps the host."""
    table = Table(title=f"{name}, bf16, sequences behind {_STREAMS_CONTEXT} tokens each, captured")
    for column in ("sequences", "ms a step", "tokens a second", "over what reading takes", "ms of the host"):
        table.add_column(column, justify="right")
    tables = _tables(max(_STREAMS), _STREAMS_CONTEXT + 1)
    served = _serve(name, shape, device, sum(map(len, tables)), captured=True)
    for num in _STREAMS:
        step = [5] * num, [_STREAMS_CONTEXT] * num, [1] * num, tables[:num], range(num)
        seconds = _seconds(lambda: served.runner.run_packed(*step))  # noqa: B023
        read = served.num_bytes + num * _STREAMS_CONTEXT * served.bytes_a_position
        floor = read / bytes_a_second
        host = _host_seconds(lambda: served.runner.run_packed(*step), device)  # noqa: B023
        cells = (f"{seconds * 1e3:.2f}", f"{num / seconds:.0f}", f"{seconds / floor:.2f}", f"{host * 1e3:.2f}")
        table.add_row(str(num), *cells)
    return table


def _rounds(target_shape: Shape, draft_shape: Shape, device: torch.device) -> Table:
    """Greedy rounds of one sequence: chains drafted ahead, and verified in one step; the closed form says what they
    bring where each draft token is accepted so likely (Leviathan et al. 2023)."""
    table = Table(title=f"rounds of one sequence behind {_CONTEXT:,} tokens, and times plain decoding they bring")
    for column in ("γ", "drafting, ms", "verifying, ms", *(f"at α = {rate:g}" for rate in _ACCEPTANCE_RATES)):
        table.add_column(column, justify="right")
    blocks = _tables(1, _CONTEXT + max(_GAMMAS) + 1)
    served = [_serve("", shape, device, len(blocks[0]), True) for shape in (target_shape, draft_shape)]
    target, draft = (each.runner for each in served)

    def verify(num_tokens: int) -> list[int]:
        rows = range(num_tokens)
        found: list[int] = argmax(target.run_packed([5] * num_tokens, [_CONTEXT], [num_tokens], blocks, rows)).tolist()
        return found

    plain = _seconds(lambda: verify(1))
    for gamma in _GAMMAS:
        plans, rows = _chain(gamma, blocks[0])
        drafting = _seconds(lambda: _draft(draft, plans, rows))  # noqa: B023
        verifying = _seconds(lambda: verify(gamma + 1))  # noqa: B023
        gains = [expected_tokens(rate, gamma) * plain / (drafting + verifying) for rate in _ACCEPTANCE_RATES]
        cells = (f"{drafting * 1e3:.2f}", f"{verifying * 1e3:.2f}", *(f"{gain:.2f}" for gain in gains))
        table.add_row(str(gamma), *cells)
    return table


def _draft(runner: ModelRunner, plans: Sequence[StepPlan], rows: Sequence[SampleRows]) -> None:
    draws = draw_ahead(rows, len(plans), runner.model.vocab_size, runner.model.device)
    assert draws is not None  # greedy ones
    runner.run_ahead(plans, draws)


def _chain(num_tokens: int, blocks: list[int]) -> tuple[list[StepPlan], list[SampleRows]]:
    """So many steps of a greedy sequence behind `_CONTEXT` tokens."""
    greedy = SamplingParams(temperature=0.0)
    sequence = EngineSequence([5] * (_CONTEXT + 1), 1, greedy, b"", drafting=True)
    sequence.block_table = blocks
    plans = [StepPlan([ScheduledSequence(sequence, _CONTEXT + i, 1, 1, [])]) for i in range(num_tokens)]
    return plans, [SampleRows(greedy, sequence.token_ids, 1)]


def _tables(num_sequences: int, num_tokens: int) -> list[list[int]]:
    """Blocks of so many sequences of so many tokens."""
    each = -(-num_tokens // _BLOCK_SIZE)
    return [list(range(i * each, (i + 1) * each)) for i in range(num_sequences)]


def _host_seconds(run: Callable[[], object], device: torch.device) -> float:
    """Until it returns, the device having nothing else to do."""
    found: list[float] = []
    for _ in range(_REPEATS):
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        run()
        found.append(time.perf_counter() - began)
    return median(found)


def _attention(device: torch.device, bytes_a_second: float) -> Table:
    """One layer of one sequence, whose last tokens are the queries, as captured with others."""
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

            def layers(query: Tensor = query, new: Tensor = new, batch: AttentionBatch = batch) -> None:
                for _ in range(_LAYERS):
                    attend(0, query, new, new, batch, 128**-0.5)

            seconds = _seconds(CudaRecorder(device).record(layers)) / _LAYERS
            floor = context * pool.position_bytes / bytes_a_second
            cells.append(f"{seconds * 1e6:.0f} ({seconds / floor:.1f})")
        table.add_row(str(num_queries), *cells)
    return table


if __name__ == "__main__":
    main()
