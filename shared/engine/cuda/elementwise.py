"""What lies between a layer's products, each in one go over its numbers."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_and_normalise(
    total,
    normal,
    x,
    added,
    weight,
    epsilon,
    HIDDEN: tl.constexpr,
    SIZE: tl.constexpr,
    HAS_ADDED: tl.constexpr,
):
    """RMSNorm of `x` + `added`, `[T, HIDDEN]`; a program for each row. The sum goes to `total`, rounded as its own type
    is, and it is that which is normalised, as transformers' modules do it; without `added` there is none."""
    row = tl.program_id(0).to(tl.int64) * HIDDEN
    places = tl.arange(0, SIZE)
    is_place = places < HIDDEN
    value = tl.load(x + row + places, mask=is_place, other=0.0)
    if HAS_ADDED:
        value = (value.to(tl.float32) + tl.load(added + row + places, mask=is_place, other=0.0).to(tl.float32)).to(
            value.dtype
        )
        tl.store(total + row + places, value, mask=is_place)
    wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / HIDDEN + epsilon)
    scaled = (wide * scale).to(value.dtype)
    weights = tl.load(weight + places, mask=is_place, other=0.0)
    # In float32 the product is exact, and rounded once, as it is in the type itself; the interpreter has none of bf16.
    product = (scaled.to(tl.float32) * weights.to(tl.float32)).to(value.dtype)
    tl.store(normal + row + places, product, mask=is_place)


@triton.jit
def gate(out, gate_up, gate_stride, MLP: tl.constexpr, SIZE: tl.constexpr):
    """SiLU of a row's first half times its second, `[T, 2 * MLP]` to `[T, MLP]`; a program for each row and `SIZE`
    numbers."""
    row = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    is_place = places < MLP
    gates = tl.load(gate_up + row * gate_stride + places, mask=is_place, other=0.0)
    ups = tl.load(gate_up + row * gate_stride + MLP + places, mask=is_place, other=0.0)
    wide = gates.to(tl.float32)
    activated = (wide * tl.sigmoid(wide)).to(gates.dtype)
    product = (activated.to(tl.float32) * ups.to(tl.float32)).to(gates.dtype)
    tl.store(out + row * MLP + places, product, mask=is_place)


@triton.jit(do_not_specialize_on_alignment=["slots"])
def rotate_and_write(
    query,
    pool,
    layer_offset,
    value_offset,
    head_stride,
    slots,
    qkv,
    qkv_stride,
    cosines,
    sines,
    query_norm,
    key_norm,
    epsilon,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    HALF_SIZE: tl.constexpr,
    HAS_NORMS: tl.constexpr,
):
    """Takes a token's head out of the product `[T, (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM]`: a query, normalised and
    rotated, to `query` `[T, NUM_HEADS, HEAD_DIM]`, a key likewise to its slot, and a value as it is; a program for each
    of `[T, NUM_HEADS + 2 * NUM_KV_HEADS]`.

    `cosines` and `sines` `[T, HEAD_DIM]`, whose second half is as the first; `slots`: as for `write_kv`. In halves, as
    what is rotated comes from the other half (Su et al. 2021, in transformers' order).
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    dims = tl.arange(0, HALF_SIZE)
    is_dim = dims < HALF
    source = qkv + token * qkv_stride + head * HEAD_DIM
    first = tl.load(source + dims, mask=is_dim, other=0.0)
    second = tl.load(source + HALF + dims, mask=is_dim, other=0.0)
    is_value = head >= NUM_HEADS + NUM_KV_HEADS
    if not is_value:
        if HAS_NORMS:
            weight = query_norm if head < NUM_HEADS else key_norm
            wide_first, wide_second = first.to(tl.float32), second.to(tl.float32)
            squares = tl.sum(wide_first * wide_first, 0) + tl.sum(wide_second * wide_second, 0)
            scale = tl.rsqrt(squares / HEAD_DIM + epsilon)
            weight_first = tl.load(weight + dims, mask=is_dim, other=0.0).to(tl.float32)
            weight_second = tl.load(weight + HALF + dims, mask=is_dim, other=0.0).to(tl.float32)
            first = ((wide_first * scale).to(first.dtype).to(tl.float32) * weight_first).to(first.dtype)
            second = ((wide_second * scale).to(second.dtype).to(tl.float32) * weight_second).to(second.dtype)
        cosine = tl.load(cosines + token * HEAD_DIM + dims, mask=is_dim, other=0.0).to(tl.float32)
        sine = tl.load(sines + token * HEAD_DIM + dims, mask=is_dim, other=0.0).to(tl.float32)
        a, b = first.to(tl.float32), second.to(tl.float32)
        first = (a * cosine - b * sine).to(first.dtype)
        second = (b * cosine + a * sine).to(second.dtype)
    if head < NUM_HEADS:
        to = query + (token * NUM_HEADS + head) * HEAD_DIM
    else:
        kv_head = (head - NUM_HEADS) % NUM_KV_HEADS
        to = pool + tl.load(slots + token) + layer_offset + kv_head * head_stride
        if is_value:
            to += value_offset
        # As in `KVPool.write`.
        first = tl.where(tl.abs(first.to(tl.float32)) < float("inf"), first, 0.0)
        second = tl.where(tl.abs(second.to(tl.float32)) < float("inf"), second, 0.0)
    tl.store(to + dims, first, mask=is_dim)
    tl.store(to + HALF + dims, second, mask=is_dim)
