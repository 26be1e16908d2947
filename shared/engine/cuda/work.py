"""How a step's attention is taken apart: into pieces of work that a GPU's processors take one after another."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from shared.engine.attention.grouping import Indices

# Numbers that describe a piece; see `Work`.
ITEM_FIELDS = 11

# Rows of a piece, queries times the heads that share a KV head: the least that tensor cores multiply, and the most that
# fit into registers, of large heads half as many; those have more bytes than this.
LEAST_ROWS = 16
_MOST_ROWS = 64
_LARGE_HEAD_BYTES = 256
# Contexts are split until there are about so many pieces, which keep a GPU busy, though none of them shorter than this.
_PIECES = 256
_LEAST_KEYS = 128
# Parts begin at multiples of this, so that all tiles but the last are full.
_TILE_KEYS = 128


class Work(NamedTuple):
    """Pieces that one launch computes, each of `num_rows` rows at most.

    `items` `[I, ITEM_FIELDS]`: of each, where its sequence's tokens and its blocks begin among the step's; how many
    rows the sequence has, and the first of the piece's; the sequence's first new position; the keys from which to which
    it attends; where the sequence's tree begins; where its partial results begin, of which this is which, of how many.
    """

    num_rows: int
    items: Indices


class Plan(NamedTuple):
    """All attention of a step in layers with one window.

    `first_parts` `[T + 1]`: where the partial results of each packed token begin; it has none if its context is whole.
    """

    work: list[Work]
    first_parts: Indices

    @property
    def num_parts(self) -> int:
        return int(self.first_parts[-1])


class StepShape(NamedTuple):
    """What of a step its attention depends on, `[S]` each: sequence i has `lengths[i]` new tokens from `starts[i]` on,
    packed from `packed_starts[i]` on, the first of which stands at `first_positions[i]` in the text; where its blocks
    begin in the table of all, and its tree among its tokens."""

    starts: Indices
    lengths: Indices
    packed_starts: Indices
    first_positions: Indices
    table_starts: Indices
    tree_starts: Indices


def is_large(head_bytes: int) -> bool:
    return head_bytes > _LARGE_HEAD_BYTES


def plan_work(step: StepShape, fold: int, num_kv_heads: int, window: int | None, head_bytes: int = 0) -> Plan:
    """`fold` query heads share a KV head; `head_bytes`: of a key or value, the larger.

    Contexts are split, however many queries look at them, into parts about as long as one another: a GPU is busy with
    one sequence or many, each takes what its own context takes, and a long one holds nobody up (Flash-Decoding, Dao et
    al. 2023, and the balance of FlashInfer, Ye et al. 2025). Partial results take the room of `_PIECES` pieces, and of
    one for each sequence, whatever the contexts.
    """
    rows = step.lengths * fold
    first_keys = np.zeros_like(step.starts)
    if window is not None:
        first_keys = np.maximum(step.first_positions - window + 1, 0) // _TILE_KEYS * _TILE_KEYS
    most_rows = _most_rows(head_bytes)
    long = rows > most_rows
    # Short queries together, in tiles for the longest of them.
    size = np.where(long, most_rows, _power_of_two(int(rows[~long].max(initial=1))))
    num_tiles = -(-rows // size)
    num_keys = step.starts + step.lengths - first_keys
    length = max(_LEAST_KEYS, -(-int((num_tiles * num_keys).sum()) * num_kv_heads // _PIECES))
    num_parts = -(-num_keys // length)
    parts_each = np.where(num_parts > 1, num_parts, 0)
    first_parts = np.concatenate([[0], np.cumsum(np.repeat(parts_each, step.lengths))])
    work = []
    for members in (np.flatnonzero(~long), np.flatnonzero(long)):
        if len(members):
            items = _items(step, members, rows, size, num_tiles, num_parts, first_keys, first_parts, fold)
            work.append(Work(int(size[members[0]]), items))
    return Plan(work, first_parts)


def lengths_of_tiles(fold: int, head_bytes: int) -> list[int]:
    """For each number of rows that pieces may have, how many queries a sequence has to have for it; the last are more
    than one piece takes."""
    most_rows, size, lengths = _most_rows(head_bytes), LEAST_ROWS, []
    while size <= most_rows:
        if _power_of_two(size // fold * fold) == size and size >= fold:
            lengths.append(size // fold)
        size *= 2
    return [*lengths, most_rows // fold + 1]


def most_pieces(num_tokens: int, num_kv_heads: int) -> int:
    """Of a step of so many tokens without long queries, in the one launch that it takes."""
    return -(-_PIECES // num_kv_heads) + 2 * num_tokens


def _items(
    step: StepShape,
    members: Indices,
    rows: Indices,
    size: Indices,
    num_tiles: Indices,
    num_parts: Indices,
    first_keys: Indices,
    first_parts: Indices,
    fold: int,
) -> Indices:
    """Of these sequences."""
    counts = num_tiles[members] * num_parts[members]
    of = np.repeat(members, counts)
    place = np.arange(len(of)) - np.repeat(np.cumsum(counts) - counts, counts)
    parts, part = num_parts[of], place % num_parts[of]
    row = place // parts * size[of]
    # The tile's last query sees itself, and nothing behind it.
    end = step.starts[of] + (np.minimum(row + size[of], rows[of]) - 1) // fold + 1
    length = -(-(end - first_keys[of]) // (parts * _TILE_KEYS)) * _TILE_KEYS
    # Those of which nothing is left say so.
    first = np.minimum(first_keys[of] + part * length, end)
    last = np.minimum(first + length, end)
    base = first_parts[step.packed_starts[of]]
    fields = (step.packed_starts[of], step.table_starts[of], rows[of], row, step.starts[of])
    return np.stack([*fields, first, last, step.tree_starts[of], base, part, parts], axis=1)


def _most_rows(head_bytes: int) -> int:
    return _MOST_ROWS // 2 if is_large(head_bytes) else _MOST_ROWS


def _power_of_two(num_rows: int) -> int:
    return max(LEAST_ROWS, 1 << (num_rows - 1).bit_length())
