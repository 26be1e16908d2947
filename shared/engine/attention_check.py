"""Whether attention by kernels of our own is what PyTorch's is, in contexts longer than a model is tested with, and in
steps of every kind that kernels are compiled for: none is left for when somebody waits."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from shared.engine.attention.batch import AttentionBatch
from shared.engine.attention.layer import LayerAttention
from shared.engine.attention.paged import attend
from shared.engine.cuda.kernels import TritonKernels
from shared.engine.cuda.work import lengths_of_tiles
from shared.engine.kv_pool import KVPool, KVShape
from shared.engine.native.library import Library
from shared.settings import StartupError

_CPU = torch.device("cpu")

# Largest difference allowed, relative to the largest number: bf16 keeps 8 bits of probabilities and of the result.
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1e-2}
# More than two of the stretches that kernels split a context into, and a window that ends within it, if it is no
# longer than most are.
_CONTEXT = 1100
_LONGEST_WINDOW = 4096
# The queries behind it, and a further sequence that has just begun. And one with a token tree, of which some lines go
# on beyond position 64, where kernels begin to lay out keys anew, while others have come to an end.
_NUM_QUERIES = 48
_NUM_BEGUN = 5
_TREE = (0, 1, 1, 0, 2, 5, 6, 3, 4, 7)
_NUM_BEFORE_TREE = 61
# Where kernels may take a context apart: each of these keys is looked for by a query of its own.
_SOUGHT = (511, 512, 1023, 1024)
# Standard deviation of the scores: so much that single keys matter.
_SCORES = 4.0


class _Queries(NamedTuple):
    """Of a step, of each sequence: how many, and its tree. Only the first has a context before them."""

    lengths: tuple[int, ...]
    trees: tuple[tuple[int, ...], ...]


_QUERIES = _Queries((_NUM_QUERIES, _NUM_BEGUN, _NUM_BEFORE_TREE + len(_TREE)), ((), (), _TREE))


def check_attention(
    kernels: Library | TritonKernels,
    shape: KVShape,
    layers: Iterable[LayerAttention],
    block_size: int,
    dtype: torch.dtype,
    most: int,
    device: torch.device = _CPU,
) -> None:
    """Compares the kernels with PyTorch in float32 on random numbers, for each way in which layers attend.

    `most`: positions of the longest context. Raises StartupError where they differ.
    """
    for how in sorted(set(layers), key=repr):
        window = min(how.sliding_window or 0, _LONGEST_WINDOW)
        context = min(most, max(_CONTEXT, window + _NUM_QUERIES))
        for queries in _steps(kernels, shape, how, dtype, most):
            num_cached = max(0, context - queries.lengths[0])
            found, expected = (
                _attended(library, shape, how, block_size, kept, dtype, num_cached, device, queries)
                for library, kept in ((kernels, dtype), (None, torch.float32))
            )
            difference, largest = (found.float() - expected).abs().max().item(), expected.abs().max().item()
            if not difference <= _TOLERANCE[dtype] * largest:
                raise StartupError(
                    f"kernels of its own attend otherwise than PyTorch, by {difference:.3g} of {largest:.3g} over "
                    f"{num_cached + queries.lengths[0]} positions ({how}, {queries.lengths} queries): native off "
                    "serves without them"
                )


def _steps(
    kernels: Library | TritonKernels, shape: KVShape, how: LayerAttention, dtype: torch.dtype, most: int
) -> list[_Queries]:
    """Steps that have each kernel run there is."""
    if isinstance(kernels, Library):
        return [_QUERIES]
    lengths = lengths_of_tiles(how.num_heads // shape.num_kv_heads, shape.head_dim * dtype.itemsize)
    return [
        _QUERIES,
        *(_Queries((length,), (tree,)) for length in lengths if length <= most for tree in ((), _TREE[:length])),
    ]


def _attended(
    kernels: Library | TritonKernels | None,
    shape: KVShape,
    how: LayerAttention,
    block_size: int,
    kept: torch.dtype,
    rounded: torch.dtype,
    num_cached: int,
    device: torch.device,
    queries: _Queries,
) -> Tensor:
    """What some queries see: the same numbers, `rounded` to this type, from a pool that keeps them as another."""
    generator = torch.Generator().manual_seed(0)

    def draw(num_tokens: int, num_heads: int, size: int, deviation: float = 1.0) -> Tensor:
        drawn = torch.randn((num_tokens, num_heads, size), generator=generator) * deviation
        return drawn.to(rounded).to(kept).to(device)

    lengths = queries.lengths
    starts = [num_cached, *(0 for _ in lengths[1:])]
    num_blocks = [-(-(start + length) // block_size) for start, length in zip(starts, lengths, strict=True)]
    pool = KVPool(shape._replace(num_layers=1), sum(num_blocks), block_size, kept, device)
    # Neither in order nor contiguous, as in service.
    blocks = iter(range(sum(num_blocks) - 1, -1, -1))
    tables = [[next(blocks) for _ in range(count)] for count in num_blocks]
    keys = draw(num_cached, shape.num_kv_heads, shape.key_head_dim)
    if num_cached:
        cached = AttentionBatch.build(pool, [0], [num_cached], tables[:1])
        pool.write(0, cached.first_slots, keys, draw(num_cached, shape.num_kv_heads, shape.value_head_dim))
    batch = AttentionBatch.build(pool, starts, lengths, tables, kernels, queries.trees)
    deviation = _SCORES / (how.scale * shape.key_head_dim**0.5)
    query = draw(batch.num_tokens, how.num_heads, shape.key_head_dim, deviation)
    fold = how.num_heads // shape.num_kv_heads
    for i, position in enumerate(_SOUGHT[: lengths[0]]):
        if position < num_cached:
            query[i] = (keys[position].repeat_interleave(fold, dim=0).float() * deviation).to(rounded)
    outside = num_cached + lengths[0] - 1 - (how.sliding_window or num_cached + lengths[0])
    if not any(queries.trees[:1]) and 0 <= outside < num_cached - 1:
        # The last query looks for the key that its window just does not reach, in every other head for the next one.
        wanted = keys[[outside, outside + 1]].repeat_interleave(fold, dim=1)
        heads = torch.arange(how.num_heads, device=device)
        found = wanted[heads % 2, heads].float() * deviation
        query[lengths[0] - 1] = found.to(rounded)
    return attend(
        0,
        query,
        draw(batch.num_tokens, shape.num_kv_heads, shape.key_head_dim),
        draw(batch.num_tokens, shape.num_kv_heads, shape.value_head_dim),
        batch,
        how.scale,
        how.sliding_window,
        how.softcap,
    )
