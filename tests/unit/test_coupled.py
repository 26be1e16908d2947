"""Draws with noise that target and drafter share."""

from __future__ import annotations

import pytest
import torch
from scipy import stats

from shared.sampling import coupled
from shared.sampling.coupled import draw_coupled
from shared.sampling.noise import gumbel_noise
from shared.sampling.params import SamplingParams
from shared.sampling.proposal import Proposal
from shared.sampling.rows import SampleRows

CPU = torch.device("cpu")


def test_seeded_draws_follow_the_distribution() -> None:
    probs = torch.tensor([0.5, 0.25, 0.15, 0.07, 0.03, 0.0])
    n = 20_000
    rows = [SampleRows(SamplingParams(seed=3), [0] * position, 1) for position in range(1, 101)]
    rows = [SampleRows(SamplingParams(seed=seed), row.token_ids, 1) for row in rows for seed in range(n // 100)]
    tokens = draw_coupled(probs.log().expand(n, -1), rows)
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
        draw_coupled(torch.zeros(1, 4), [SampleRows(SamplingParams(temperature=0.7), [1], 1)])
