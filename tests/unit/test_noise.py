"""Counter-based Gumbel noise."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from shared.sampling import noise
from shared.sampling.noise import gumbel_noise

CPU = torch.device("cpu")


def splitmix64(state: int, count: int) -> list[int]:
    """The first outputs of SplitMix64 as its authors publish it."""
    outputs = []
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        z = state
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        outputs.append(z ^ (z >> 31))
    return outputs


def uniform(noise: Tensor) -> Tensor:
    """Back from standard Gumbel noise to its distribution function: uniform on (0, 1)."""
    return (-(-noise.double()).exp()).exp()


def test_the_reference_generator_gives_the_published_outputs() -> None:
    assert splitmix64(1234567, 5) == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


@pytest.mark.parametrize(("seed", "index", "position"), [(0, 0, 0), (42, 3, 1000), (2**64 - 1, 15, 131071)])
def test_noise_is_the_named_stream_of_the_named_key(seed: int, index: int, position: int) -> None:
    """Pinned by an independent implementation: a seed names the same tokens for ever."""
    key = splitmix64(0, 1)[0] if seed == 0 else _entry(0, seed)
    key = _entry(_entry(key, index), position)
    expected = [-math.log(-math.log(((bits >> 12) + 0.5) / 2**52)) for bits in splitmix64(key, 50)]
    got = gumbel_noise([seed], [index], [position], 50, CPU)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got[0], torch.tensor(expected), rtol=1e-6, atol=1e-6)


def _entry(state: int, counter: int) -> int:
    """Entry `counter` of a stream: one step from the state before it."""
    return splitmix64((state + counter * 0x9E3779B97F4A7C15) % 2**64, 1)[0]


def test_noise_depends_on_nothing_but_its_four_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds, indices, positions = [7, 7, 7, 8], [0, 0, 1, 0], [11, 12, 11, 11]
    together = gumbel_noise(seeds, indices, positions, 100, CPU)
    for i in range(4):
        alone = gumbel_noise(seeds[i : i + 1], indices[i : i + 1], positions[i : i + 1], 130, CPU)
        assert torch.equal(alone[0, :100], together[i])
    assert len({tuple(row) for row in together.tolist()}) == 4
    monkeypatch.setattr(noise, "_CPU_CHUNK", 250)
    assert torch.equal(gumbel_noise(seeds, indices, positions, 100, CPU), together)


def test_the_bits_are_the_same_whoever_makes_them() -> None:
    keys = [0, 1, 2**63, 2**64 - 1, 12345678901234567890]
    signed = torch.tensor([noise._signed(key) for key in keys])
    assert torch.equal(noise._numpy_bits(np.array(keys, dtype=np.uint64), 5000), noise._torch_bits(signed, 5000))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_noise_is_the_same_on_every_device() -> None:
    arguments = ([3, 2**63], [0, 1], [5, 6], 50_000)
    assert torch.equal(gumbel_noise(*arguments, torch.device("cuda")).cpu(), gumbel_noise(*arguments, CPU))


@pytest.mark.parametrize("axis", ["seed", "index", "position", "token"])
def test_noise_is_gumbel_and_independent_along_every_counter(axis: str) -> None:
    n, zeros, counters = 20_000, [0] * 20_000, list(range(20_000))
    if axis == "token":
        drawn = gumbel_noise([1], [0], [9], n, CPU)[0]
    else:
        names = {"seed": zeros, "index": zeros, "position": zeros} | {axis: counters}
        drawn = gumbel_noise(names["seed"], names["index"], names["position"], 1, CPU)[:, 0]
    assert stats.kstest(drawn.numpy(), "gumbel_r").pvalue > 0.001
    u = uniform(drawn)
    for lag in (1, 2, 64):  # pairs fill the unit square evenly
        cells = (u[:-lag] * 8).long() * 8 + (u[lag:] * 8).long()
        assert stats.chisquare(torch.bincount(cells, minlength=64).numpy()).pvalue > 0.001
    bits = (u * 2**16).long()
    ones = torch.stack([(bits >> i) & 1 for i in range(16)]).double().mean(1)
    assert float((ones - 0.5).abs().max()) < 5 * 0.5 / math.sqrt(n)
