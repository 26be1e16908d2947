"""The test that admits a model: packed, chunked and paged, it must still be the same model."""

from __future__ import annotations

import torch

from shared.engine.model import CausalLM
from shared.engine.runner import ModelRunner
from shared.settings import StartupError

# Largest difference of logits allowed, relative to the largest logit. Half precisions round differently in
# differently shaped products; recurrent state or a misplaced token is off by far more.
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}
_LENGTHS = (41, 27)
_CHUNK = 11


def self_test(model: CausalLM, runner: ModelRunner) -> None:
    """Runs two random sequences in interleaved chunks over real blocks, and compares every logit with the
    model's own forward. Raises StartupError saying what differed. Leaves KV only in blocks nobody owns.
    """
    block_size = runner.pool.block_size
    generator = torch.Generator().manual_seed(0)
    lengths = [min(length, model.max_context) for length in _LENGTHS]
    texts = [torch.randint(model.vocab_size, (length,), generator=generator).to(model.device) for length in lengths]
    blocks_each = -(-max(lengths) // block_size)
    if runner.pool.num_blocks < 2 * blocks_each:
        raise StartupError(f"num_blocks is {runner.pool.num_blocks}: at least {2 * blocks_each} are needed")
    # Neither in order nor contiguous, as in service.
    tables = [list(range(2 * blocks_each - 1, -1, -2)), list(range(0, 2 * blocks_each, 2))]
    references = [model.reference_logits(text) for text in texts]
    for start in range(0, max(lengths), _CHUNK):
        alive = [i for i in range(2) if start < lengths[i]]
        chunks = [texts[i][start : start + _CHUNK].tolist() for i in alive]
        tokens = [token for chunk in chunks for token in chunk]
        try:
            logits = runner.run_packed(
                tokens,
                [start] * len(alive),
                [len(chunk) for chunk in chunks],
                [tables[i] for i in alive],
                range(len(tokens)),
            )
        except TypeError as error:
            raise StartupError(f"model {model.name} cannot be served: {error}") from error
        offset = 0
        for i, chunk in zip(alive, chunks, strict=True):
            expected = references[i][start : start + len(chunk)].float()
            difference = (logits[offset : offset + len(chunk)].float() - expected).abs().max().item()
            allowed = _TOLERANCE[model.dtype] * max(1.0, expected.abs().max().item())
            if not difference <= allowed:
                raise StartupError(
                    f"model {model.name} cannot be served: packed over paged KV its logits at positions "
                    f"{start} to {start + len(chunk) - 1} differ by {difference:.3g} from its own forward's "
                    f"(at most {allowed:.3g} allowed); it may keep state besides the KV cache"
                )
            offset += len(chunk)
