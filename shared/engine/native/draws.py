"""Draws by the kernels."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from shared.engine.native.library import Library
from shared.sampling.kernels import Likeliest


class NativeDraws:
    """`DrawKernels`; of equals the first come first. Between steps of a model whatever Python does is found in no cache
    and takes several times as long, calls of torch most of all: so there are few."""

    def __init__(self, library: Library) -> None:
        self._library = library

    def draw(self, scores: Tensor, keys: Sequence[int], temperatures: Sequence[float]) -> Tensor:
        scores, (num_rows, vocab_size) = scores.contiguous(), scores.shape
        keys, temperatures = array("q", keys), array("f", temperatures)
        ids = torch.empty(num_rows, dtype=torch.int64)
        self._library.drawn(
            scores.data_ptr(), _address(keys), _address(temperatures), num_rows, vocab_size, ids.data_ptr(),
            torch.get_num_threads(),
        )  # fmt: skip
        return ids

    def likeliest(self, scores: Tensor, keys: Sequence[int], temperatures: Sequence[float], most: int) -> Likeliest:
        scores, (num_rows, vocab_size) = scores.contiguous(), scores.shape
        keys, temperatures = array("q", keys), array("f", temperatures)
        ids, logprobs = array("q", [0]) * (num_rows * most), array("f", [0]) * (num_rows * most)
        self._library.likeliest(
            scores.data_ptr(), _address(keys), _address(temperatures), num_rows, vocab_size, most, _address(ids),
            _address(logprobs), torch.get_num_threads(),
        )  # fmt: skip
        firsts = range(0, num_rows * most, most)
        return [ids[i : i + most].tolist() for i in firsts], [logprobs[i : i + most].tolist() for i in firsts]

    def draw_unseeded(self, scores: Tensor, temperatures: Sequence[float], uniforms: Tensor) -> Tensor:
        scores, (num_rows, vocab_size) = scores.contiguous(), scores.shape
        temperatures, ids = array("f", temperatures), torch.empty(num_rows, dtype=torch.int64)
        self._library.drawn_unseeded(
            scores.data_ptr(), _address(temperatures), uniforms.data_ptr(), num_rows, vocab_size, ids.data_ptr(),
            torch.get_num_threads(),
        )  # fmt: skip
        return ids


def _address(values: array[int] | array[float]) -> int:
    return values.buffer_info()[0]
