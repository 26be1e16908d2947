"""One step's attention, as the Triton kernels see it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from shared.engine.attention.layer import LayerAttention
from shared.engine.cuda.attention import attend_pieces, merge_parts, write_kv
from shared.engine.cuda.device import device_of
from shared.engine.cuda.elementwise import rotate_and_write
from shared.engine.cuda.work import ITEM_FIELDS, LEAST_ROWS, is_large
from shared.engine.kv_pool import KVPool

# Programs for each of a device's processors: as many as run at a time, which take one piece after another.
_PROGRAMS_EACH = 4
# On a CPU, where Triton's interpreter runs them one after another, for tests.
_CPU_PROGRAMS = 3
# Rows of a piece of attention beside which a program may have registers for more keys, and heads that are small.
_FEW_ROWS = 32
_SMALL_HEAD_BYTES = 128
# Major capability.
_HOPPER = 9
# Parts put together at a time.
_PARTS = 32


class HeadNorms(NamedTuple):
    """RMSNorms of each head, before it is rotated: weights `[head_dim]`."""

    query: Tensor
    key: Tensor
    epsilon: float


class Launch(NamedTuple):
    """`items`, of which the device knows how many there are (`num_items`), of `num_rows` rows each at most; by so many
    programs."""

    num_rows: int
    num_programs: int
    num_items: Tensor
    items: Tensor


class Tile(NamedTuple):
    """Keys that a program looks at at a time, its warps, and for how many tiles of keys it has room."""

    num_keys: int
    num_warps: int
    num_stages: int


class WindowTensors(NamedTuple):
    """Of layers with one window, see `work.Plan`: what is launched, where partial results are, and how many of them
    there are at most; `ancestors` `[T]`: what the tokens of trees see."""

    launches: list[Launch]
    first_parts: Tensor
    num_parts: int
    ancestors: Tensor


class CudaStep:
    """Attention of one step's `num_tokens` packed tokens.

    `places` `[T]`: where in layer 0 the key of each belongs; `tables`: all sequences' blocks; `positions` `[T]`: in the
    text; `of_window`: what belongs to layers with that many heads to a KV head and that window. `is_filled_up`: whether
    there are tokens that are nobody's, which attend to nothing.
    """

    def __init__(
        self,
        pool: KVPool,
        num_tokens: int,
        places: Tensor,
        tables: Tensor,
        positions: Tensor,
        has_trees: bool,
        of_window: Callable[[int, int | None], WindowTensors],
        *,
        is_filled_up: bool = False,
    ) -> None:
        self._pool = pool
        self._num_tokens = num_tokens
        self._places = places
        self._tables = tables
        self._positions = positions
        self._has_trees = has_trees
        self._of_window = of_window
        self._is_filled_up = is_filled_up

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        sliding_window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """As `attention.paged.attend`."""
        with device_of(query):
            self._write(layer, key, value)
            how = LayerAttention(query.shape[1], scale, sliding_window, softcap)
            # Who knows what a model's own layers would make of numbers that nobody wrote.
            new = query.new_zeros if self._is_filled_up else query.new_empty
            return self._look(layer, query, how, sinks, new)

    def _write(self, layer: int, key: Tensor, value: Tensor) -> None:
        pool, shape, stride = self._pool, self._pool.shape, self._pool.data.stride()
        key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (key, value))
        key_size, value_size = _padded(shape.key_head_dim), _padded(shape.value_head_dim)
        write_kv[(self._num_tokens, shape.num_kv_heads)](
            pool.data, layer * stride[1], stride[2], stride[4],
            self._places, key, *key.stride()[:2], value, *value.stride()[:2],
            shape.key_head_dim, shape.value_head_dim, key_size, value_size,
        )  # fmt: skip

    def attend_product(
        self, layer: int, qkv: Tensor, cosines: Tensor, sines: Tensor, norms: HeadNorms | None, how: LayerAttention
    ) -> Tensor:
        """The same of the product `[T, (num_heads + 2 * num_kv_heads) * head_dim]` that query, key and value are taken
        from, not normalised or rotated yet; `cosines` and `sines` `[T, head_dim]` as transformers' rotary embeddings
        make them."""
        pool, shape, stride = self._pool, self._pool.shape, self._pool.data.stride()
        head_dim = shape.key_head_dim
        query = qkv.new_empty((self._num_tokens, how.num_heads, head_dim))
        norm = HeadNorms(qkv, qkv, 0.0) if norms is None else norms
        rotate_and_write[(self._num_tokens, how.num_heads + 2 * shape.num_kv_heads)](
            query, pool.data, layer * stride[1], stride[2], stride[4],
            self._places, qkv, qkv.stride(0), cosines, sines, norm.query, norm.key, norm.epsilon,
            NUM_HEADS=how.num_heads,
            NUM_KV_HEADS=shape.num_kv_heads,
            HEAD_DIM=head_dim,
            HALF=head_dim // 2,
            HALF_SIZE=_padded(head_dim // 2),
            HAS_NORMS=norms is not None,
        )  # fmt: skip
        return self._look(layer, query, how, None, query.new_empty)

    def _look(
        self,
        layer: int,
        query: Tensor,
        how: LayerAttention,
        sinks: Tensor | None,
        new: Callable[[tuple[int, int, int]], Tensor],
    ) -> Tensor:
        """`[T, num_heads, value_head_dim]`, once the step's own keys and values are where they belong; `new` memory for
        it, of which what is of nobody's tokens stays as it is."""
        pool, shape, stride = self._pool, self._pool.shape, self._pool.data.stride()
        query = query if query.stride(-1) == 1 else query.contiguous()
        num_heads, scale, sliding_window, softcap = how
        key_size, value_size = _padded(shape.key_head_dim), _padded(shape.value_head_dim)
        fold = num_heads // shape.num_kv_heads
        its = self._of_window(fold, sliding_window)
        out = new((self._num_tokens, num_heads, shape.value_head_dim))
        parts = torch.empty(
            (max(1, its.num_parts), num_heads, shape.value_head_dim), dtype=torch.float32, device=query.device
        )
        part_logs = torch.empty((max(1, its.num_parts), num_heads), dtype=torch.float32, device=query.device)
        for num_rows, num_programs, num_items, items in its.launches:
            head_bytes = max(key_size, value_size) * query.element_size()
            tile = tile_of(num_rows, head_bytes, self._has_trees, generation_of(query.device))
            attend_pieces[(num_programs,)](
                out, parts, part_logs,
                query, *query.stride()[:2],
                pool.data, layer * stride[1], stride[0], stride[2], stride[3], stride[4],
                items, num_items, self._tables, self._positions, its.ancestors,
                out if sinks is None else sinks.detach(),
                scale, softcap or 0.0, sliding_window or 0,
                NUM_KV_HEADS=shape.num_kv_heads,
                FOLD=fold,
                KEY_DIM=shape.key_head_dim,
                VALUE_DIM=shape.value_head_dim,
                KEY_SIZE=key_size,
                VALUE_SIZE=value_size,
                BLOCK_SIZE=pool.block_size,
                ROWS=num_rows,
                KEYS=tile.num_keys,
                ITEM_FIELDS=ITEM_FIELDS,
                HAS_WINDOW=sliding_window is not None,
                HAS_SOFTCAP=softcap is not None,
                HAS_SINKS=sinks is not None,
                HAS_TREES=self._has_trees,
                UPCAST=not query.is_cuda and query.dtype == torch.bfloat16,
                num_warps=tile.num_warps,
                num_stages=tile.num_stages,
            )  # fmt: skip
        if its.num_parts:
            merge_parts[(self._num_tokens, num_heads)](
                out, parts, part_logs, its.first_parts, num_heads, shape.value_head_dim, value_size, _PARTS
            )
        return out


def tile_of(num_rows: int, head_bytes: int, has_trees: bool, generation: int) -> Tile:
    """For pieces of so many rows, of heads of so many bytes, on devices of that major capability: as large as fits into
    registers, and was the fastest on an H100."""
    if is_large(head_bytes):
        return Tile(32, 4, 2)
    if num_rows <= LEAST_ROWS:
        return Tile(128, 4, 2)
    if num_rows <= _FEW_ROWS:
        return Tile(64, 4, 3) if head_bytes <= _SMALL_HEAD_BYTES else Tile(64 if has_trees else 128, 4, 2)
    return Tile(64, 4, 2) if generation == _HOPPER else Tile(32, 8, 3)


@functools.cache
def generation_of(device: torch.device) -> int:
    """Its major capability; 0 of a CPU."""
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 0


def num_programs(device: torch.device) -> int:
    """As many as run at a time."""
    if device.type == "cpu":
        return _CPU_PROGRAMS
    return _PROGRAMS_EACH * torch.cuda.get_device_properties(device).multi_processor_count


def _padded(dim: int) -> int:
    """The power of two that holds a head of this size, and that tensor cores take."""
    return max(16, 1 << (dim - 1).bit_length())
