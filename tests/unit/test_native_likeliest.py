"""The likeliest few of many tokens by the kernels, against the definition in float64."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

from shared.engine.native.likeliest import NativeLikeliest
from shared.sampling.branching import likeliest_by_torch
from tests.support.kernels import INSTRUCTION_SETS, kernels


def defined(scores: Tensor, most: int) -> tuple[list[list[int]], Tensor]:
    """By a stable sort, of equals the first first."""
    order = scores.double().sort(dim=1, descending=True, stable=True).indices[:, :most]
    return order.tolist(), scores.double().log_softmax(1).gather(1, order)


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize(
    ("num_rows", "vocab_size", "most"),
    [(1, 1, 1), (3, 7, 7), (2, 16, 5), (5, 1025, 8), (8, 8192, 8), (12, 50_257, 64), (0, 40, 8)],
)
@pytest.mark.parametrize("spread", [0.01, 3.0, 400.0])
def test_they_are_the_largest_best_first(
    instruction_set: str, num_rows: int, vocab_size: int, most: int, spread: float
) -> None:
    generator = torch.Generator().manual_seed(vocab_size + num_rows)
    scores = torch.randn((num_rows, vocab_size), generator=generator) * spread
    ids, logprobs = NativeLikeliest(kernels(instruction_set))(scores, most)
    expected_ids, expected = defined(scores, most)
    assert ids == expected_ids
    torch.testing.assert_close(torch.tensor(logprobs).double().view(expected.shape), expected, rtol=2e-6, atol=5e-6)


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_of_equals_the_first_come_first(instruction_set: str) -> None:
    dice = random.Random(1)
    scores = torch.tensor([[float(dice.randrange(3)) for _ in range(100)] for _ in range(20)])
    ids, _ = NativeLikeliest(kernels(instruction_set))(scores, 50)
    assert ids == defined(scores, 50)[0]


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("vocab_size", [3, 40])
def test_what_is_filtered_out_is_never_found(instruction_set: str, vocab_size: int) -> None:
    """Nor does it count: the rest are all there is. And rows that are no numbers have none."""
    scores = torch.full((3, vocab_size), -math.inf)
    scores[0, 2], scores[0, 0] = 1.0, 3.0
    scores[2] = math.nan
    found = NativeLikeliest(kernels(instruction_set))
    ids, logprobs = found(scores, 3)
    assert ids[0][:2] == [0, 2]
    assert logprobs[0] == pytest.approx([-math.log1p(math.exp(-2)), -2 - math.log1p(math.exp(-2)), -math.inf])
    assert not any(map(math.isfinite, logprobs[1] + logprobs[2]))


def test_scores_of_other_kinds_are_torchs() -> None:
    """And of any strides."""
    found = NativeLikeliest(kernels(INSTRUCTION_SETS[0]))
    scores = torch.randn((40, 4), generator=torch.Generator().manual_seed(1))
    assert found(scores.T, 5)[0] == likeliest_by_torch(scores.T, 5)[0]
    assert found(scores.bfloat16(), 3) == likeliest_by_torch(scores.bfloat16(), 3)
