"""The likeliest few of many tokens by the kernels."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from shared.engine.native.library import Library
from shared.sampling.branching import likeliest_by_torch

# Fewer numbers are looked through sooner by one thread than others wake up.
_LEAST_SHARED = 1 << 16


class NativeLikeliest:
    """What `likeliest_by_torch` finds, of scores in this memory, but that of equals the first come first."""

    def __init__(self, library: Library) -> None:
        self._library = library

    def __call__(self, scores: Tensor, most: int) -> tuple[list[list[int]], list[list[float]]]:
        if scores.device.type != "cpu" or scores.dtype != torch.float32:
            return likeliest_by_torch(scores, most)
        scores = scores.contiguous()
        num_rows, vocab_size = scores.shape
        ids = np.empty((num_rows, most), dtype=np.int64)
        logprobs = np.empty((num_rows, most), dtype=np.float32)
        num_threads = torch.get_num_threads() if scores.numel() >= _LEAST_SHARED else 1
        self._library.likeliest(
            scores.data_ptr(), num_rows, vocab_size, most, ids.ctypes.data, logprobs.ctypes.data, num_threads
        )
        return ids.tolist(), logprobs.tolist()
