"""Gumbel noise by the kernels: the very stream that the definition names."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch

from shared.engine.native.noise import NativeNoise
from shared.sampling import coupled
from tests.support.kernels import INSTRUCTION_SETS, kernels

WORD = (1 << 64) - 1


def defined(key: int, token_id: int) -> float:
    """By whole numbers and the C library's logarithm."""
    z = (key + (token_id + 1) * 0x9E3779B97F4A7C15) & WORD
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & WORD
    z ^= z >> 31
    return -math.log(-math.log(((z >> 12) + 0.5) * 2.0**-52))


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (2, 1023), (2, 1024), (5, 1025), (0, 8), (1, 8193)])
def test_noise_is_the_stream_of_each_key(instruction_set: str, shape: tuple[int, int]) -> None:
    dice = random.Random(7)
    keys = [dice.getrandbits(64) for _ in range(shape[0])]
    # Rows of a tree that predict the same position have the same key.
    keys[2::2] = keys[:1] * len(keys[2::2])
    noise = NativeNoise(kernels(instruction_set))(np.array(keys, dtype=np.uint64), shape[1])
    expected = torch.tensor([[defined(key, token) for token in range(shape[1])] for key in keys], dtype=torch.float64)
    assert noise.shape == shape
    assert torch.equal(noise, expected.float().view(shape))


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_a_million_numbers_are_numpys(instruction_set: str) -> None:
    keys = np.random.default_rng(3).integers(0, WORD, 64, dtype=np.uint64, endpoint=True)
    noise, expected = NativeNoise(kernels(instruction_set))(keys, 1 << 15), coupled.noise_by_numpy(keys, 1 << 15)
    others = noise != expected
    assert others.sum() <= 4, "rounded to float32 the other way"
    torch.testing.assert_close(noise, expected, rtol=2e-7, atol=0.0)


def test_keys_may_lie_apart_in_memory() -> None:
    noise = NativeNoise(kernels(INSTRUCTION_SETS[0]))
    keys = np.arange(8, dtype=np.uint64)
    assert torch.equal(noise(keys[::2], 40), noise(keys, 40)[::2])
