"""Counter-based Gumbel noise and the draws made with it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from shared.sampling import coupled
from shared.sampling.coupled import coupled_tokens, draw_coupled, gumbel_noise
from shared.sampling.params import SamplingParams
from shared.sampling.proposal import Proposal
from shared.sampling.rows import SampleRows

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
    monkeypatch.setattr(coupled, "_CPU_CHUNK", 250)
    assert torch.equal(gumbel_noise(seeds, indices, positions, 100, CPU), together)


def test_the_bits_are_the_same_whoever_makes_them() -> None:
    keys = [0, 1, 2**63, 2**64 - 1, 12345678901234567890]
    signed = torch.tensor([coupled._signed(key) for key in keys])
    assert torch.equal(coupled._numpy_bits(np.array(keys, dtype=np.uint64), 5000), coupled._torch_bits(signed, 5000))


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


def test_seeded_draws_follow_the_distribution() -> None:
    probs = torch.tensor([0.5, 0.25, 0.15, 0.07, 0.03, 0.0])
    n = 20_000
    rows = [SampleRows(SamplingParams(seed=3), [0] * position, 1) for position in range(1, 101)]
    rows = [SampleRows(SamplingParams(seed=seed), row.token_ids, 1) for row in rows for seed in range(n // 100)]
    tokens = coupled_tokens(probs.log().expand(n, -1), rows)
    counts = torch.bincount(tokens, minlength=6)
    assert counts[5] == 0
    expected = probs[:5].double() / probs.double().sum() * n
    assert stats.chisquare(counts[:5].numpy(), expected.numpy()).pvalue > 0.001


def test_similar_distributions_mostly_draw_alike() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4000, 50, generator=generator)
    near = logits + 0.1 * torch.randn(4000, 50, generator=generator)
    rows = [SampleRows(SamplingParams(seed=seed), [1], 1) for seed in range(4000)]
    agree = float((draw_coupled(logits, rows) == draw_coupled(near, rows)).float().mean())
    assert agree > 0.9


def test_greedy_and_seeded_rows_mix() -> None:
    logits = torch.randn(7, 40, generator=torch.Generator().manual_seed(1))
    greedy = SampleRows(SamplingParams(temperature=0.0), [1, 2], 1, Proposal((4, 5)))
    seeded = SampleRows(SamplingParams(seed=9, sequence_index=2), [1, 2], 2, Proposal((4, 5, 6)))
    got = draw_coupled(logits, [greedy, seeded])
    assert got[:3].tolist() == logits[:3].argmax(1).tolist()
    assert got[3:].tolist() == draw_coupled(logits[3:], [seeded]).tolist()
    noise = gumbel_noise([9] * 4, [2] * 4, [2, 3, 4, 5], 40, CPU)
    assert got[3:].tolist() == (logits[3:].log_softmax(1) + noise).argmax(1).tolist()


def test_a_greedy_batch_is_its_argmax_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(coupled, "sampling_logprobs")
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(2)).bfloat16()
    rows = SampleRows(SamplingParams(temperature=0.0, top_k=3), [1], 1, Proposal((4, 5)))
    assert draw_coupled(logits, [rows]).tolist() == logits.argmax(1).tolist()


def test_a_sampled_sequence_without_a_seed_is_refused() -> None:
    with pytest.raises(ValueError, match=r"params\.seed is None at temperature 0\.7"):
        coupled_tokens(torch.zeros(1, 4), [SampleRows(SamplingParams(temperature=0.7), [1], 1)])
