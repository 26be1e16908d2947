"""Products by kernels of our own: exact to bf16's rounding, and the same to the bit whatever they are computed with."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from shared.engine.native.matrix import NativeMatrix
from shared.engine.quantised_weight import QuantisedWeight
from tests.support.kernels import INSTRUCTION_SETS, kernels
from tests.support.threads import threads

# One row's own, blocks of unequal length, more than one pass; odd and whole numbers of inputs and panels.
ROWS = (1, 2, 3, 5, 6, 7, 11, 12, 13, 16, 17, 25, 32, 33, 70)
SHAPES = ((64, 32), (7, 1), (33, 95), (256, 200), (1, 40))


def randn(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).bfloat16()


def _cores_of(thread: int) -> set[int]:
    """No core, of a thread that has ended."""
    with suppress(ProcessLookupError):
        return os.sched_getaffinity(thread)
    return set()


def _keep_to(thread: int, cores: set[int]) -> None:
    with suppress(ProcessLookupError):
        os.sched_setaffinity(thread, cores)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_products_are_those_of_the_layers(instruction_set: str, shape: tuple[int, int]) -> None:
    inputs, outputs = shape
    first, second = nn.Linear(inputs, outputs).bfloat16(), nn.Linear(inputs, 5, bias=False).bfloat16()
    matrix = NativeMatrix.of(kernels(instruction_set), [first, second], {})
    assert matrix.sizes == [outputs, 5]
    for rows in ROWS:
        x = randn(rows, inputs)
        exact = torch.cat([nn.functional.linear(x.double(), first.weight.double(), first.bias.double()),
                           x.double() @ second.weight.double().T], dim=-1)  # fmt: skip
        torch.testing.assert_close(matrix.product(x).double(), exact, rtol=2**-8, atol=1e-4)


@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_a_rows_product_does_not_depend_on_the_others(instruction_set: str, bits: int) -> None:
    weight = randn(90, 300) if bits == 16 else QuantisedWeight.of(randn(90, 300), bits)
    matrix = NativeMatrix(kernels(instruction_set), [weight], [None])
    x = randn(70, 300, seed=1)
    alone = torch.cat([matrix.product(x[i : i + 1]) for i in range(len(x))])
    for rows in (2, 5, 7, 12, 16, 17, 31, 32, 33, 40, 67, 70):
        assert torch.equal(matrix.product(x[:rows]), alone[:rows])
    x[3] = torch.nan
    assert torch.equal(matrix.product(x)[4:], alone[4:])


@pytest.fixture
def two_threads() -> Iterator[None]:
    with threads(2):
        yield


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one core")
@pytest.mark.usefixtures("two_threads")
def test_threads_that_meet_on_a_core_part_and_may_still_use_all() -> None:
    matrix = NativeMatrix(kernels("avx2"), [weight := randn(640, 64)], [None])
    x = randn(3, 64, seed=1)
    exact = matrix.product(x)  # and the threads are there
    torch.testing.assert_close(exact.double(), x.double() @ weight.double().T, rtol=2**-8, atol=1e-4)
    # Threads that other tests had may end meanwhile.
    found = {int(path.name): _cores_of(int(path.name)) for path in Path("/proc/self/task").iterdir()}
    before = {thread: cores for thread, cores in found.items() if cores}
    first, second = sorted(os.sched_getaffinity(0))[:2]
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as hog:
        try:
            os.sched_setaffinity(hog.pid, {second})
            for cores in ({first}, {first, second}):
                for thread in before:
                    _keep_to(thread, cores)
                for _ in range(20):
                    assert torch.equal(matrix.product(x), exact)
                assert all(_cores_of(thread) in (cores, set()) for thread in before)
        finally:
            hog.kill()
            for thread, cores in before.items():
                _keep_to(thread, cores)


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_any_layout_of_inputs_and_none(instruction_set: str) -> None:
    matrix = NativeMatrix(kernels(instruction_set), [randn(32, 16)], [None])
    x = randn(16, 6).T
    assert torch.equal(matrix.product(x), matrix.product(x.contiguous()))
    assert matrix.product(x.reshape(2, 3, 16)).shape == (2, 3, 32)
    assert matrix.product(randn(0, 16)).shape == (0, 32)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("shape", [*SHAPES, (150, 70)], ids=str)
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_quantised_products_are_those_of_what_the_weights_stand_for(
    instruction_set: str, shape: tuple[int, int], bits: int
) -> None:
    inputs, outputs = shape
    weights = [QuantisedWeight.of(randn(size, inputs, seed=size), bits) for size in (outputs, 5)]
    bias = randn(5)
    matrix = NativeMatrix(kernels(instruction_set), weights, [None, bias])
    exact_weight = torch.cat([weight.dequantised() for weight in weights]).double()
    for rows in ROWS:
        x = randn(rows, inputs)
        exact = x.double() @ exact_weight.T
        exact[:, outputs:] += bias
        torch.testing.assert_close(matrix.product(x).double(), exact, rtol=2**-8, atol=1e-4)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_every_quantised_number_comes_back(instruction_set: str, bits: int) -> None:
    """Times one input that is 1, among others that are 0; each column has them in another order."""
    most = 2 ** (bits - 1) - 1
    numbers = torch.arange(-most, most + 1).to(torch.int8)
    values = torch.stack([numbers.roll(i) for i in range(131)], dim=1)
    num_groups, group = (3, 64) if bits == 4 else (1, 131)
    weight = QuantisedWeight(values, torch.full((len(values), num_groups), 0.5), bits, group)
    matrix = NativeMatrix(kernels(instruction_set), [weight], [None])
    assert torch.equal(matrix.product(torch.eye(131).bfloat16()).float(), 0.5 * values.T)
