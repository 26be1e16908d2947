"""The test that admits a model: packed, chunked and paged, it must still be the same model."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from shared.engine.attention_check import check_attention
from shared.engine.cuda.kernels import TritonKernels
from shared.engine.failure import is_device_error
from shared.engine.model import CausalLM
from shared.engine.native.library import Library
from shared.engine.runner import ModelRunner
from shared.settings import StartupError

logger = logging.getLogger(__name__)

# Difference of a step's logits allowed, relative to all of them (by norms) and the largest one relative to the largest
# logit. Half precisions round differently in differently shaped products; recurrent state or a misplaced token is off
# by far more. A model's own forward in bf16 may have single logits a fifth off where its weights amplify rounding.
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}
_TOLERANCE_OF_ONE = {torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 2.5e-1}
_LENGTHS = (41, 27)
_CHUNK = 11
# Of steps that are captured at start.
_FIRST_SIZES = 17


def self_test(model: CausalLM, runner: ModelRunner) -> None:
    """Lays the model's weights out for serving, runs two random sequences in interleaved chunks over real
    blocks, and compares every logit with the model's own forward before. Kernels' attention is compared with
    PyTorch's, too, over longer contexts. Raises StartupError saying what differed. Leaves KV only in blocks nobody
    owns.
    """
    block_size = runner.pool.block_size
    least = least_blocks(model, block_size)
    if runner.pool.num_blocks < least:
        raise StartupError(f"num_blocks is {runner.pool.num_blocks}: at least {least} are needed")
    generator = torch.Generator().manual_seed(0)
    lengths = [min(length, model.max_context) for length in _LENGTHS]
    texts = [torch.randint(model.vocab_size, (length,), generator=generator).to(model.device) for length in lengths]
    # Neither in order nor contiguous, as in service.
    tables = [list(range(least - 1, -1, -2)), list(range(0, least, 2))]
    try:
        references = [model.reference_logits(text) for text in texts]
        check_kernels(model, block_size)
        model.pack()
        _compare(model, runner, texts, tables, references)
        if isinstance(model.attention_kernels, TritonKernels):
            _try_fused(model, lambda: _compare(model, runner, texts, tables, references))
    except StartupError:
        raise
    except Exception as error:
        # Whatever modelling code raises that was written for another kind of attention, the verdict is the same.
        raise StartupError(
            f"model {model.name} cannot be served: it does not run packed over paged KV "
            f"({type(error).__name__}: {' '.join(str(error).split())})"
        ) from error


def least_blocks(model: CausalLM, block_size: int) -> int:
    """What the test takes."""
    return len(_LENGTHS) * -(-min(max(_LENGTHS), model.max_context) // block_size)


def check_kernels(model: CausalLM, block_size: int) -> None:
    """Raises StartupError if those of a CPU attend otherwise than PyTorch; those of a GPU are left out then, whatever
    keeps them from it."""
    kernels = model.attention_kernels
    if kernels is None:
        return
    how = (model.kv_shape, model.attention, block_size, model.dtype, model.max_context, model.device)
    if isinstance(kernels, Library):
        check_attention(kernels, *how)
        return
    try:
        check_attention(kernels, *how)
        logger.info("kernels of its own attend")
    except Exception as error:
        if is_device_error(error):
            raise
        logger.warning("PyTorch attends: kernels of its own do not", exc_info=error)
        model.leave_triton()


def _try_fused(model: CausalLM, compare: Callable[[], None]) -> None:
    """Has layers computed in few launches each, if that is the same."""
    try:
        if num_fused := model.fuse():
            compare()
            logger.info("layers fused", extra={"layers": num_fused})
    except Exception as error:
        if is_device_error(error):
            raise
        logger.warning("layers compute as ever: fused, they do not do so", exc_info=error)
        model.unfuse()


def try_captured(model: CausalLM, runner: ModelRunner, scratch_block: int) -> None:
    """Has steps of few tokens replayed as graphs, on a GPU, if that is the same, and the first sizes captured; nobody
    owns that block, or any other as yet."""
    from shared.engine.cuda.graphs import MOST_TOKENS, CapturedSteps, CudaRecorder

    tables = [[0, 1], [2, 3]]
    if model.device.type != "cuda" or runner.pool.num_blocks <= max(map(max, tables)) + 1:
        return
    generator = torch.Generator().manual_seed(1)

    def steps() -> Iterator[Tensor]:
        starts = [0, 0]
        for lengths in ([5, 3], [1, 1], [4, 4], [1, 1]):
            drawn = torch.randint(model.vocab_size, (sum(lengths),), generator=generator)
            # As for what is drawn ahead, ids may be on the device.
            tokens = drawn.to(model.device) if max(lengths) == 1 else drawn.tolist()
            yield runner.run_packed(tokens, starts, lengths, tables, range(len(tokens))).float().clone()
            starts = [start + length for start, length in zip(starts, lengths, strict=True)]

    try:
        expected = list(steps())
        generator.manual_seed(1)
        recorder = CudaRecorder(model.device)
        captured = CapturedSteps(model.torch_forward, runner.pool, model.attention, scratch_block, recorder)
        runner.run_captured(captured)
        # The largest first, whose memory the others make do with.
        runner.run_packed(
            [0] * MOST_TOKENS, [0] * MOST_TOKENS, [1] * MOST_TOKENS, [[0]] * MOST_TOKENS, range(MOST_TOKENS)
        )
        for ours, theirs in zip(steps(), expected, strict=True):
            if difference := _difference(ours, theirs, model.dtype):
                raise StartupError(f"captured, logits differ by {difference}")
        _capture_first(runner)
        if captured.captures:
            logger.info("steps captured")
    except Exception as error:
        if is_device_error(error):
            raise
        logger.warning("steps run without graphs: captured, they are not the same", exc_info=error)
        runner.run_captured(None)


def _capture_first(runner: ModelRunner) -> None:
    """Steps of sizes that come first, and most often, so that no request waits for them: of that many sequences, and of
    one that verifies so many tokens, in a line or a tree. All their KV is in block 0."""
    for size in range(1, min(_FIRST_SIZES, runner.model.max_context) + 1):
        tokens, rows, table = [0] * size, range(size), [0] * size
        runner.run_packed(tokens, [0] * size, [1] * size, [[0]] * size, rows)
        for parents in ((), (0,) * (size - 1)):
            runner.run_packed(tokens, [0], [size], [table], rows, [parents])


def _compare(
    model: CausalLM, runner: ModelRunner, texts: list[Tensor], tables: list[list[int]], references: list[Tensor]
) -> None:
    """Runs the texts in chunks; raises StartupError where logits differ from `references`, `[length, vocab_size]`."""
    lengths = [len(text) for text in texts]
    for start in range(0, max(lengths), _CHUNK):
        alive = [i for i in range(2) if start < lengths[i]]
        chunks = [texts[i][start : start + _CHUNK].tolist() for i in alive]
        tokens = [token for chunk in chunks for token in chunk]
        # Last position first: a model that returns all logits whatever is asked for does not pass.
        logits = runner.run_packed(
            tokens,
            [start] * len(alive),
            [len(chunk) for chunk in chunks],
            [tables[i] for i in alive],
            range(len(tokens) - 1, -1, -1),
        )
        expected = torch.cat([references[i][start : start + _CHUNK] for i in alive]).flip(0).float()
        if difference := _difference(logits.float(), expected, model.dtype):
            raise StartupError(
                f"model {model.name} cannot be served: packed over paged KV its logits at positions "
                f"{start} to {start + max(map(len, chunks)) - 1} differ from its own forward's by {difference}; it "
                "may keep state besides the KV cache, or not return logits where it is asked for them"
            )


def _difference(ours: Tensor, theirs: Tensor, dtype: torch.dtype) -> str:
    """By how much logits differ, `[tokens, vocab_size]` each, and what is allowed; empty where that is not more."""
    apart = ours - theirs
    share = apart.norm().item() / max(1.0, theirs.norm().item())
    of_one = apart.abs().max().item() / max(1.0, theirs.abs().max().item())
    if share <= _TOLERANCE[dtype] and of_one <= _TOLERANCE_OF_ONE[dtype]:
        return ""
    return (
        f"{share:.3g} of them all and {of_one:.3g} of the largest (at most {_TOLERANCE[dtype]:g} and "
        f"{_TOLERANCE_OF_ONE[dtype]:g} allowed)"
    )
