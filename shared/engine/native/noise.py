"""Gumbel noise of coupled sampling by the kernels."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shared.engine.native.library import Library

# Fewer numbers are made sooner by one thread than others wake up.
_LEAST_SHARED = 1 << 14


class NativeNoise:
    """A `NoiseMaker`: what NumPy makes, but that a number in some ten million is rounded to float32 the other way."""

    def __init__(self, library: Library) -> None:
        self._library = library

    def __call__(self, keys: NDArray[np.uint64], vocab_size: int) -> Tensor:
        noise = torch.empty(len(keys), vocab_size)
        keys = np.ascontiguousarray(keys)
        num_threads = torch.get_num_threads() if noise.numel() >= _LEAST_SHARED else 1
        self._library.gumbel(keys.ctypes.data, len(keys), vocab_size, noise.data_ptr(), num_threads)
        return noise
