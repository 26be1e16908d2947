"""Truncation, drawing and acceptance by rejection sampling, against closed forms."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from scipy import stats
from torch import Tensor

from shared.sampling.rejection import Draft, accept, draw, truncate


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def one_token_drafts(q: Tensor, ids: Tensor, tokens: Tensor) -> Draft:
    """One draft token for each of `tokens` [S] indices into q [K] over `ids` [K]."""
    n, width = len(tokens), len(q)
    return Draft([1] * n, ids[tokens], [width] * n, ids.repeat(n), q.repeat(n))


def chisquare(tokens: Tensor, probs: Tensor) -> float:
    """p-value of tokens having been drawn from probs; one outside the support fails at once."""
    counts = torch.bincount(tokens, minlength=len(probs)).double()
    inside = probs > 0
    assert counts[~inside].sum() == 0
    if inside.sum() == 1:
        return 1.0
    expected = probs[inside].double() / probs.double().sum() * counts.sum()
    return float(stats.chisquare(counts[inside].numpy(), expected.numpy()).pvalue)


def test_truncation_keeps_the_fewest_entries_that_hold_the_mass() -> None:
    rows = torch.tensor([[0.1, 0.6, 0.05, 0.25], [0.25, 0.25, 0.25, 0.25], [1.0, 0.0, 0.0, 0.0]])
    ids, probs = truncate(rows.log(), mass=0.84)
    assert ids.shape == probs.shape == (3, 4)
    assert ids[0, :2].tolist() == [1, 3]
    torch.testing.assert_close(probs[0], torch.tensor([0.6 / 0.85, 0.25 / 0.85, 0.0, 0.0]))
    torch.testing.assert_close(probs[1], torch.full((4,), 0.25))
    assert int(ids[2, 0]) == 0
    assert probs[2].tolist() == [1.0, 0.0, 0.0, 0.0]


def test_truncation_is_no_wider_than_needed_and_never_wider_than_allowed() -> None:
    logprobs = torch.randn(5, 1000, generator=generator()).log_softmax(1)
    ids, probs = truncate(logprobs, mass=0.98, max_entries=64)
    assert ids.shape == (5, 64)
    torch.testing.assert_close(probs.sum(1), torch.ones(5))
    expected = logprobs.exp().sort(dim=1, descending=True)
    assert ids.tolist() == expected.indices[:, :64].tolist()
    assert truncate(logprobs[:, :3].log_softmax(1), mass=0.0)[0].shape == (5, 1)


@pytest.mark.parametrize("scale", [1.0, 1e-6, 1e6])
def test_draws_follow_the_weights_whatever_they_sum_to(scale: float) -> None:
    weights = torch.tensor([0.0, 0.5, 0.0, 0.2, 0.3, 0.0]) * scale
    assert chisquare(draw(weights.expand(20_000, -1), generator()), weights) > 0.001


def test_a_draw_is_an_index_even_from_nan() -> None:
    assert 0 <= int(draw(torch.full((1, 5), torch.nan), generator())) < 5


P = torch.tensor([0.4, 0.3, 0.2, 0.1, 0.0, 0.0])
DRAFTS = {
    "well": ([0, 1, 2, 3], [0.45, 0.25, 0.2, 0.1]),
    "badly": ([3, 2, 1], [0.7, 0.2, 0.1]),
    "never": ([4, 5], [0.5, 0.5]),
    "beyond the vocabulary": ([6, 900, 0], [0.4, 0.3, 0.3]),
    "perfectly": ([0, 1, 2, 3], [0.4, 0.3, 0.2, 0.1]),
}


@pytest.mark.parametrize(("ids", "q"), DRAFTS.values(), ids=DRAFTS.keys())
def test_what_follows_is_the_target_whatever_the_draft(ids: Sequence[int], q: Sequence[float]) -> None:
    n, rng = 30_000, generator(1)
    q_probs, q_ids = torch.tensor(q), torch.tensor(ids)
    draft = one_token_drafts(q_probs, q_ids, draw(q_probs.expand(n, -1), rng))
    bonus = P.flip(0)
    num_accepted, following = accept(torch.stack((P, bonus)).repeat(n, 1), draft, rng)
    kept = num_accepted == 1
    first = torch.where(kept, draft.token_ids, following)
    assert chisquare(first, P) > 0.001
    # Acceptance rate: sum of min(p, q) (Leviathan et al. 2023, theorem 3.5).
    p_of_ids = torch.tensor([float(P[i]) if i < len(P) else 0.0 for i in ids])
    rate = float(torch.minimum(p_of_ids, q_probs).sum())
    assert stats.binomtest(int(kept.sum()), n, min(rate, 1.0)).pvalue > 0.001
    if rate > 0:
        assert chisquare(following[kept], bonus) > 0.001
    if rate < 1:
        full_q = torch.zeros(1000).index_put((q_ids,), q_probs)[: len(P)]
        assert chisquare(following[~kept], (P - full_q).clamp(min=0)) > 0.001


def test_an_empty_residual_falls_back_to_the_target() -> None:
    """q above p everywhere, as rounding may have it: a rejection leaves nothing to recover from."""
    n, rng = 4000, generator(2)
    draft = one_token_drafts(P[:4] * 1.5, torch.arange(4), draw(P[:4].expand(n, -1), rng))
    num_accepted, following = accept(P.repeat(2 * n, 1), draft, rng)
    rejected = num_accepted == 0
    assert 0.2 < float(rejected.float().mean()) < 0.5
    assert chisquare(following[rejected], P) > 0.001


def test_a_ragged_batch_is_accepted_sequence_by_sequence() -> None:
    """Point masses make the outcome certain: which tokens are kept, and where the last one comes from."""
    vocab_size = 8
    lengths = [0, 3, 1, 2]
    target = [[1], [2, 3, 4, 5], [6, 7], [1, 2, 3]]  # row j of a sequence allows one token only
    drafts: list[list[int]] = [[], [2, 3, 0], [6], [0, 2]]
    probs = torch.nn.functional.one_hot(torch.tensor([t for s in target for t in s]), vocab_size).float()
    flat = torch.tensor([t for s in drafts for t in s])
    spread = (flat + 1) % vocab_size  # each drawn from two candidates, the drawn one second
    draft = Draft(
        lengths, flat, [2] * 6, torch.stack((spread, flat), 1).flatten(), torch.tensor([0.25, 0.75]).repeat(6)
    )
    num_accepted, following = accept(probs, draft, generator(3))
    assert num_accepted.tolist() == [0, 2, 1, 0]
    assert following.tolist() == [1, 4, 7, 1]
