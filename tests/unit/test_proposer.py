"""Draft tokens and the distributions that travel with them."""

from __future__ import annotations

import struct

import pytest
import torch
from scipy import stats

from services.draft.proposer import draw
from shared.sampling.coupled import draw_coupled
from shared.sampling.params import SamplingParams
from shared.sampling.rows import SampleRows

LOGITS = torch.randn(4, 700, generator=torch.Generator().manual_seed(0)) * 2
SAMPLED = SamplingParams(temperature=0.9)
SEEDED = SamplingParams(seed=4)
GREEDY = SamplingParams(temperature=0.0)


def rows(*params: SamplingParams) -> list[SampleRows]:
    return [SampleRows(each, [1, 2, 3], 2) for each in params]


def test_coupled_sequences_draw_what_the_target_would() -> None:
    chosen = rows(GREEDY, SEEDED, SEEDED, GREEDY)
    out = draw(LOGITS, chosen)
    assert [tokens.token_ids for tokens in out] == [(token,) for token in draw_coupled(LOGITS, chosen).tolist()]
    assert all(tokens.candidates is None and tokens.num_accepted == 0 for tokens in out)
    assert out[0].token_ids == (int(LOGITS[0].argmax()),)


def test_candidates_are_the_truncated_distribution_packed() -> None:
    out = draw(LOGITS, rows(SAMPLED, SamplingParams(top_k=3), SAMPLED, SAMPLED), mass=0.9, max_entries=100)
    for i, tokens in enumerate(out):
        assert tokens.candidates is not None
        count, packed_ids, packed_probs = tokens.candidates
        ids = struct.unpack(f"<{count}I", packed_ids)
        probs = struct.unpack(f"<{count}f", packed_probs)
        exact = (LOGITS[i].double() / (1.0 if i == 1 else 0.9)).softmax(0).sort(descending=True)
        values = exact.values[:3] / exact.values[:3].sum() if i == 1 else exact.values
        assert count == min(100, 1 + int((values.cumsum(0)[:-1] < 0.9).sum()))
        assert list(ids) == exact.indices[:count].tolist()
        assert probs == pytest.approx((values[:count] / values[:count].sum()).tolist(), rel=1e-4)
        assert sum(probs) == pytest.approx(1.0, abs=1e-5)
        assert min(probs) > 0
        assert tokens.token_ids[0] in ids


def test_tokens_are_drawn_from_the_candidates_sent() -> None:
    n = 10_000
    out = draw(
        LOGITS[:1].expand(n, -1), rows(SAMPLED) * n, mass=0.5, max_entries=6, generator=torch.Generator().manual_seed(1)
    )
    assert out[0].candidates is not None
    count, packed_ids, packed_probs = out[0].candidates
    ids, probs = struct.unpack(f"<{count}I", packed_ids), struct.unpack(f"<{count}f", packed_probs)
    counts = [sum(tokens.token_ids[0] == token for tokens in out) for token in ids]
    assert sum(counts) == n
    assert stats.chisquare(counts, [n * p / sum(probs) for p in probs]).pvalue > 0.001


def test_a_mixed_batch_keeps_its_order() -> None:
    out = draw(LOGITS, rows(SAMPLED, GREEDY, SAMPLED, SEEDED))
    assert [tokens.candidates is None for tokens in out] == [False, True, False, True]
    assert out[1].token_ids == (int(LOGITS[1].argmax()),)
    assert out[3].token_ids == (int(draw_coupled(LOGITS[3:], rows(SEEDED))),)
    only = draw(LOGITS[2:3], rows(SAMPLED))[0]
    assert only.candidates == out[2].candidates


def test_the_draft_vocabulary_may_be_the_smaller_one() -> None:
    penalised = SamplingParams(repetition_penalty=1.2, logit_bias={5000: 1.0}, presence_penalty=0.1)
    out = draw(LOGITS[:1], [SampleRows(penalised, [1, 9000, 3], 1)])
    assert out[0].token_ids[0] < LOGITS.shape[1]


def test_another_number_of_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="logits has 4 rows where the sequences have 1"):
        draw(LOGITS, rows(GREEDY))


def test_an_empty_step_is_empty() -> None:
    assert draw(LOGITS[:0], []) == []
