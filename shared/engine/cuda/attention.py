"""Attention of ragged queries over paged KV, split over the context, and the KV's way into its blocks."""

from __future__ import annotations

import triton
import triton.language as tl

_LOG2_E = tl.constexpr(1.4426950408889634)
# Of a tree, ancestors are told by the bits of a word.
_TREE_BITS = tl.constexpr(64)


# Where those begin says nothing: each would have kernels compiled of its own.
@triton.jit(do_not_specialize_on_alignment=["items", "num_items", "tables", "positions", "ancestors"])
def attend_pieces(
    out,
    parts,
    part_logs,
    query,
    query_token_stride,
    query_head_stride,
    pool,
    layer_offset,
    block_stride,
    value_offset,
    position_stride,
    head_stride,
    items,
    num_items,
    tables,
    positions,
    ancestors,
    sinks,
    scale,
    softcap,
    window,
    NUM_KV_HEADS: tl.constexpr,
    FOLD: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    ITEM_FIELDS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_TREES: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Online softmax in float32 (FlashAttention-2, Dao 2023) of one piece after another, for one KV head each.

    A row is a query and one of the `FOLD` heads that share the KV head. `items` are those of `work.Work`, `num_items`
    of them: a number on the device, so that a captured launch serves steps of any number. Whole contexts go to `out`
    `[T, heads, VALUE_DIM]`; parts, and the logarithm to base 2 of what their softmax divided by, to `parts`
    `[P, heads, VALUE_DIM]` and `part_logs` `[P, heads]`, float32. `ancestors` `[T]`: of a tree's token, by bits, which
    of the tree's tokens it sees. `sinks` `[heads]`: a further score of each head, that gives no value. Only what lies
    before a piece's last key is read: what else is in the blocks may be anything.
    """
    num_heads: tl.constexpr = NUM_KV_HEADS * FOLD
    key_dims = tl.arange(0, KEY_SIZE)
    value_dims = tl.arange(0, VALUE_SIZE)
    for index in range(tl.program_id(0), tl.load(num_items) * NUM_KV_HEADS, tl.num_programs(0)):
        item = items + (index // NUM_KV_HEADS) * ITEM_FIELDS
        kv_head = index % NUM_KV_HEADS
        first_token = tl.load(item)
        table = tables + tl.load(item + 1)
        num_rows = tl.load(item + 2)
        first_row = tl.load(item + 3)
        start = tl.load(item + 4)
        first_key = tl.load(item + 5)
        end_key = tl.load(item + 6)
        tree_start = tl.load(item + 7)
        first_part = tl.load(item + 8)
        part = tl.load(item + 9)
        num_parts = tl.load(item + 10)

        rows = first_row + tl.arange(0, ROWS)
        is_row = rows < num_rows
        tokens = first_token + rows // FOLD
        heads = kv_head * FOLD + rows % FOLD
        places = tokens * query_token_stride + heads * query_head_stride
        q = tl.load(
            query + places[:, None] + key_dims[None, :],
            mask=is_row[:, None] & (key_dims < KEY_DIM)[None, :],
            other=0.0,
        )
        if UPCAST:
            q = q.to(tl.float32)
        slots = start + rows // FOLD
        if HAS_WINDOW:
            oldest = tl.load(positions + tokens, mask=is_row, other=0) - window
        if HAS_TREES:
            lineage = tl.load(ancestors + tokens, mask=is_row, other=0)

        most = tl.full([ROWS], float("-inf"), tl.float32)
        divisor = tl.zeros([ROWS], tl.float32)
        attended = tl.zeros([ROWS, VALUE_SIZE], tl.float32)
        if HAS_SINKS:
            if part == 0:
                most = tl.load(sinks + heads, mask=is_row, other=0.0).to(tl.float32) * _LOG2_E
                divisor += 1.0

        for first in range(first_key, end_key, KEYS):
            keys = first + tl.arange(0, KEYS)
            is_key = keys < end_key
            blocks = tl.load(table + keys // BLOCK_SIZE, mask=is_key, other=0)
            lies = blocks * block_stride + layer_offset + (keys % BLOCK_SIZE) * position_stride + kv_head * head_stride
            k = tl.load(
                pool + lies[None, :] + key_dims[:, None],
                mask=is_key[None, :] & (key_dims < KEY_DIM)[:, None],
                other=0.0,
            )
            v = tl.load(
                pool + value_offset + lies[:, None] + value_dims[None, :],
                mask=is_key[:, None] & (value_dims < VALUE_DIM)[None, :],
                other=0.0,
            )
            if UPCAST:
                k = k.to(tl.float32)
                v = v.to(tl.float32)
            scores = tl.dot(q, k, input_precision="ieee") * scale
            if HAS_SOFTCAP:
                # softcap * tanh(scores / softcap)
                scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)
            sees = is_key[None, :] & is_row[:, None] & (keys[None, :] <= slots[:, None])
            if HAS_TREES:
                behind = keys - tree_start
                bit = tl.minimum(tl.maximum(behind, 0), _TREE_BITS - 1)
                is_ancestor = ((lineage[:, None] >> bit[None, :]) & 1) != 0
                if HAS_WINDOW:
                    sees &= tl.where(behind[None, :] < 0, keys[None, :] > oldest[:, None], is_ancestor)
                else:
                    sees &= (behind[None, :] < 0) | is_ancestor
            elif HAS_WINDOW:
                sees &= keys[None, :] > oldest[:, None]
            scores = tl.where(sees, scores * _LOG2_E, float("-inf"))
            highest = tl.maximum(most, tl.max(scores, 1))
            # Rows that have seen nothing yet have no highest score to subtract.
            base = tl.where(highest == float("-inf"), 0.0, highest)
            weights = tl.exp2(scores - base[:, None])
            rescale = tl.exp2(most - base)
            divisor = divisor * rescale + tl.sum(weights, 1)
            attended = attended * rescale[:, None]
            attended = tl.dot(weights.to(v.dtype), v, attended, input_precision="ieee")
            most = highest

        has_seen = divisor > 0.0
        attended = attended / tl.where(has_seen, divisor, 1.0)[:, None]
        is_out = is_row[:, None] & (value_dims < VALUE_DIM)[None, :]
        if num_parts == 1:
            to = (tokens * num_heads + heads) * VALUE_DIM
            tl.store(out + to[:, None] + value_dims[None, :], attended.to(out.dtype.element_ty), mask=is_out)
        else:
            to = (first_part + (rows // FOLD) * num_parts + part) * num_heads + heads
            tl.store(parts + to[:, None] * VALUE_DIM + value_dims[None, :], attended, mask=is_out)
            log = tl.where(has_seen, most + tl.log2(tl.where(has_seen, divisor, 1.0)), float("-inf"))
            tl.store(part_logs + to, log, mask=is_row)


@triton.jit(do_not_specialize_on_alignment=["first_parts"])
def merge_parts(
    out,
    parts,
    part_logs,
    first_parts,
    NUM_HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    PARTS: tl.constexpr,
):
    """What `attend_pieces` made of the parts of a token's context, put together, for a head; a program for each of
    `[T, heads]`. `first_parts`: as in `work.Plan`. Tokens without parts are left as they are."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    first = tl.load(first_parts + token)
    end = tl.load(first_parts + token + 1)
    if first < end:
        dims = tl.arange(0, VALUE_SIZE)
        most = float("-inf")
        divisor = 0.0
        merged = tl.zeros([VALUE_SIZE], tl.float32)
        for place in range(first, end, PARTS):
            some = place + tl.arange(0, PARTS)
            logs = tl.load(part_logs + some * NUM_HEADS + head, mask=some < end, other=float("-inf"))
            values = tl.load(
                parts + (some[:, None] * NUM_HEADS + head) * VALUE_DIM + dims[None, :],
                mask=(some < end)[:, None] & (dims < VALUE_DIM)[None, :],
                other=0.0,
            )
            highest = tl.maximum(most, tl.max(logs, 0))
            base = tl.where(highest == float("-inf"), 0.0, highest)
            weights = tl.exp2(logs - base)
            rescale = tl.exp2(most - base)
            divisor = divisor * rescale + tl.sum(weights, 0)
            merged = merged * rescale + tl.sum(values * weights[:, None], 0)
            most = highest
        merged = merged / tl.where(divisor > 0.0, divisor, 1.0)
        to = out + (token * NUM_HEADS + head) * VALUE_DIM
        tl.store(to + dims, merged.to(out.dtype.element_ty), mask=dims < VALUE_DIM)


@triton.jit(do_not_specialize_on_alignment=["slots"])
def write_kv(
    pool,
    layer_offset,
    value_offset,
    head_stride,
    slots,
    key,
    key_token_stride,
    key_head_stride,
    value,
    value_token_stride,
    value_head_stride,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
):
    """Puts a token's key and value of one KV head to where they belong; a program for each of `[T, KV heads]`.

    `slots` `[T]`: where in layer 0 the key is. What is not a finite number becomes 0, as in `KVPool.write`.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    to = pool + tl.load(slots + token) + layer_offset + head * head_stride
    dims = tl.arange(0, KEY_SIZE)
    k = tl.load(key + token * key_token_stride + head * key_head_stride + dims, mask=dims < KEY_DIM, other=0.0)
    tl.store(to + dims, tl.where(tl.abs(k.to(tl.float32)) < float("inf"), k, 0.0), mask=dims < KEY_DIM)
    dims = tl.arange(0, VALUE_SIZE)
    v = tl.load(value + token * value_token_stride + head * value_head_stride + dims, mask=dims < VALUE_DIM, other=0.0)
    tl.store(to + value_offset + dims, tl.where(tl.abs(v.to(tl.float32)) < float("inf"), v, 0.0), mask=dims < VALUE_DIM)
