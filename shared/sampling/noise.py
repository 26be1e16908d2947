"""Noise that belongs to a position, not to whoever draws there."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_WORD = (1 << 64) - 1
# SplitMix64 (Steele, Lea and Flood 2014): the increment, and the finalizer's multipliers and shifts.
_INCREMENT = 0x9E3779B97F4A7C15
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_SHIFTS = (30, 27, 31)

# Elements of noise made at a time: what a CPU's cache holds; elsewhere, what bounds the scratch memory.
_CPU_CHUNK = 1 << 16
_CHUNK = 1 << 24


def gumbel_noise(
    seeds: Sequence[int],
    sequence_indices: Sequence[int],
    positions: Sequence[int],
    vocab_size: int,
    device: torch.device,
) -> Tensor:
    """Standard Gumbel noise [R, V] float32, a pure function of (seed, sequence index, position, token id).

    The three sequences of length R hold a uint64 and two counters for each row. Each row is the SplitMix64
    stream of a key mixed from these, entry t of it being token t's, so neither the vocabulary's size nor
    the other rows matter. Bits are integer arithmetic; the logarithms run in float64 and are rounded to
    float32, which hides what devices' libraries differ in.
    """
    keys = [noise_key(*which) for which in zip(seeds, sequence_indices, positions, strict=True)]
    return noise_of(torch.tensor(keys, dtype=torch.int64, device=device), vocab_size)


def noise_key(seed: int, sequence_index: int, position: int) -> int:
    """What the noise of one row is made from: a uint64, as an int64 with the same bits."""
    return _signed(_key(seed, sequence_index, position))


def noise_of(keys: Tensor, vocab_size: int) -> Tensor:
    """`gumbel_noise` of rows with these `noise_key`s [R] int64, on their device."""
    if keys.device.type == "cpu":
        return _noise_on_cpu(keys.numpy().view(np.uint64), vocab_size)
    noise = torch.empty(len(keys), vocab_size, device=keys.device)
    num_rows = max(1, _CHUNK // vocab_size)
    for first in range(0, len(keys), num_rows):
        noise[first : first + num_rows] = _gumbel(_torch_bits(keys[first : first + num_rows], vocab_size))
    return noise


def _noise_on_cpu(keys: NDArray[np.uint64], vocab_size: int) -> Tensor:
    noise = torch.empty(len(keys), vocab_size)
    num_rows = max(1, _CPU_CHUNK // vocab_size)
    for first in range(0, len(keys), num_rows):
        noise[first : first + num_rows] = _gumbel(_numpy_bits(keys[first : first + num_rows], vocab_size))
    return noise


def _gumbel(bits: Tensor) -> Tensor:
    """From 52 bits each, float64."""
    # 52 bits and a half: strictly between 0 and 1, and exact in float64.
    uniform = bits.double().add_(0.5).mul_(2.0**-52)
    return uniform.log_().neg_().log_().neg_()


# In a tree many rows predict the same position, and what was not accepted is drafted once more.
@functools.lru_cache(maxsize=4096)
def _key(seed: int, sequence_index: int, position: int) -> int:
    return _stream(_stream(_stream(0, seed), sequence_index), position)


def _stream(key: int, counter: int) -> int:
    """Entry `counter` of the SplitMix64 stream that starts at `key`; both and the result are uint64."""
    bits = (key + (counter + 1) * _INCREMENT) & _WORD
    for shift, multiplier in zip(_SHIFTS, _MULTIPLIERS, strict=False):
        bits = ((bits ^ (bits >> shift)) * multiplier) & _WORD
    return bits ^ (bits >> _SHIFTS[-1])


def _numpy_bits(keys: NDArray[np.uint64], vocab_size: int) -> Tensor:
    """52 bits [R, V] int64 of each key's stream. NumPy knows unsigned words, so that this takes half of what it takes
    torch."""
    bits = keys[:, None] + _numpy_steps(vocab_size)
    shifted = np.empty_like(bits)

    def mix(shift: int) -> None:
        np.right_shift(bits, np.uint64(shift), out=shifted)
        np.bitwise_xor(bits, shifted, out=bits)

    for shift, multiplier in zip(_SHIFTS, _MULTIPLIERS, strict=False):
        mix(shift)
        np.multiply(bits, np.uint64(multiplier), out=bits)
    mix(_SHIFTS[-1])
    np.right_shift(bits, np.uint64(12), out=bits)
    return torch.from_numpy(bits.view(np.int64))


@functools.lru_cache(maxsize=4)
def _numpy_steps(vocab_size: int) -> NDArray[np.uint64]:
    return np.arange(1, vocab_size + 1, dtype=np.uint64) * np.uint64(_INCREMENT)


def _torch_bits(keys: Tensor, vocab_size: int) -> Tensor:
    """The same on any device."""
    steps = torch.arange(1, vocab_size + 1, device=keys.device) * _signed(_INCREMENT)
    return _shifted(_finalized(keys.unsqueeze(1) + steps), 12)


def _finalized(bits: Tensor) -> Tensor:
    """SplitMix64's finalizer, as in `_stream`, in place on int64 `bits`."""
    for shift, multiplier in zip(_SHIFTS, _MULTIPLIERS, strict=False):
        bits ^= _shifted(bits, shift)
        bits *= _signed(multiplier)
    bits ^= _shifted(bits, _SHIFTS[-1])
    return bits


def _signed(word: int) -> int:
    """The int64 with the bits of a uint64: torch computes in int64, where products wrap alike."""
    return word - (1 << 64) if word >> 63 else word


def _shifted(bits: Tensor, shift: int) -> Tensor:
    """Logical right shift of int64 `bits`: the sign bits that torch's arithmetic shift draws in are cleared."""
    return (bits >> shift).bitwise_and_((1 << (64 - shift)) - 1)
