"""Rounds of drafting and verification over table models: losslessness itself."""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from services.draft import proposer
from shared.sampling import filters
from shared.sampling.params import SamplingParams
from shared.sampling.proposal import EMPTY_PROPOSAL, Proposal
from shared.sampling.rows import SampleRows
from shared.sampling.sampled import SampledTokens
from shared.sampling.verifier import check_proposal, verify

VOCAB_SIZE = 10


def table(seed: int, vocab_size: int = VOCAB_SIZE, scale: float = 1.5) -> Tensor:
    """A language model: row t holds the logits of what follows token t."""
    return torch.randn(vocab_size, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


def target_logits(model: Tensor, rows: Sequence[SampleRows]) -> Tensor:
    return model[[token for row in rows for token in (row.token_ids[-1], *row.proposal.token_ids)]]


def proposed(drawn: Sequence[SampledTokens]) -> Proposal:
    """One sequence's draft tokens, packed as they travel."""
    candidates = [token.candidates for token in drawn if token.candidates is not None]
    return Proposal(
        tuple(token.token_ids[0] for token in drawn),
        tuple(count for count, _, _ in candidates),
        b"".join(ids for _, ids, _ in candidates),
        b"".join(probs for _, _, probs in candidates),
    )


def propose(
    model: Tensor, rows: Sequence[SampleRows], num_draft_tokens: int, generator: torch.Generator, **truncation: Any
) -> list[SampleRows]:
    """`rows` with proposals that `model` drafted."""
    drawn: list[list[SampledTokens]] = [[] for _ in rows]
    tokens = [list(row.token_ids) for row in rows]
    for _ in range(num_draft_tokens):
        step = [replace(row, token_ids=known) for row, known in zip(rows, tokens, strict=True)]
        logits = model[[known[-1] for known in tokens]]
        for known, mine, new in zip(
            tokens, drawn, proposer.draw(logits, step, generator=generator, **truncation), strict=True
        ):
            known.append(new.token_ids[0])
            mine.append(new)
    return [replace(row, proposal=proposed(mine)) for row, mine in zip(rows, drawn, strict=True)]


TARGET = table(0)
DRAFTS: dict[str, Callable[[], Tensor]] = {
    "well": lambda: TARGET + table(1, scale=0.3),
    "badly": lambda: table(2),
}
FILTERS = {
    "T=1": SamplingParams(),
    "T=0.6": SamplingParams(temperature=0.6),
    "top_k": SamplingParams(temperature=1.2, top_k=5),
    "top_p": SamplingParams(top_p=0.8),
}
TRUNCATIONS: list[dict[str, float]] = [{}, {"mass": 0.7, "max_entries": 3}]


def distribution(logits: Tensor, params: SamplingParams) -> Tensor:
    """The target's distribution under the request's filters, by transformers."""
    warpers: Any = LogitsProcessorList([TemperatureLogitsWarper(params.temperature)])
    if params.top_k:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        warpers.append(TopPLogitsWarper(params.top_p))
    scores: Tensor = warpers(torch.zeros(len(logits), 1, dtype=torch.int64), logits)
    return scores.double().softmax(1)


def transition_pvalue(before: Tensor, after: Tensor, probs: Tensor) -> float:
    """Chi-square p-value of `after` having been drawn from the rows of `probs` that `before` names."""
    counts = torch.zeros_like(probs).index_put_((before, after), torch.ones((), dtype=torch.float64), accumulate=True)
    expected = counts.sum(1, keepdim=True) * probs
    assert counts[probs == 0].sum() == 0
    # Cells too small for the chi-square approximation are counted together, row by row.
    small = expected < 5
    rest = [(x * small).sum(1, keepdim=True) for x in (counts, expected)]
    counts = torch.cat((counts.masked_fill(small, 0), rest[0]), 1)
    expected = torch.cat((expected.masked_fill(small, 0), rest[1]), 1)
    cells = expected > 1
    statistic = float(((counts - expected)[cells] ** 2 / expected[cells]).sum())
    freedom = int((cells.sum(1) - 1).clamp(min=0).sum())
    return float(stats.chi2.sf(statistic, freedom))


@pytest.mark.parametrize("truncation", TRUNCATIONS, ids=["truncation as set", "tight truncation"])
@pytest.mark.parametrize("params", FILTERS.values(), ids=FILTERS.keys())
@pytest.mark.parametrize("draft", DRAFTS.values(), ids=DRAFTS.keys())
def test_every_position_follows_the_target(
    draft: Callable[[], Tensor], params: SamplingParams, truncation: dict[str, float]
) -> None:
    n, rng = 4000, torch.Generator().manual_seed(7)
    probs = distribution(TARGET, params)
    tokens = [[3] for _ in range(n)]
    num_accepted = 0
    while short := [known for known in tokens if len(known) < 4]:
        rows = propose(draft(), [SampleRows(params, known, 1) for known in short], 2, rng, **truncation)
        for known, new in zip(short, verify(target_logits(TARGET, rows), rows, rng), strict=True):
            known.extend(new.token_ids)
            num_accepted += new.num_accepted
    assert num_accepted > n / 4
    history = torch.tensor([known[:4] for known in tokens])
    for position in range(1, 4):
        assert transition_pvalue(history[:, position - 1], history[:, position], probs) > 0.001


def test_a_draft_that_never_agrees_is_never_kept_and_does_no_harm() -> None:
    n, rng = 8000, torch.Generator().manual_seed(8)
    target, draft = TARGET.clone(), TARGET.clone()
    target[:, 6:] = -torch.inf
    draft[:, :6] = -torch.inf
    rows = propose(draft, [SampleRows(SamplingParams(), [3], 1)] * n, 2, rng)
    out = verify(target_logits(target, rows), rows, rng)
    assert {tokens.num_accepted for tokens in out} == {0}
    after = torch.tensor([tokens.token_ids[0] for tokens in out])
    assert transition_pvalue(torch.full((n,), 3), after, distribution(target, SamplingParams())) > 0.001


def test_a_wider_draft_vocabulary_is_tolerated() -> None:
    n, rng = 8000, torch.Generator().manual_seed(9)
    draft = table(3, vocab_size=VOCAB_SIZE + 4, scale=0.5)
    rows = propose(draft, [SampleRows(SamplingParams(), [3], 1)] * n, 1, rng)
    alien = [row.proposal.token_ids[0] >= VOCAB_SIZE for row in rows]
    assert sum(alien) > n / 10
    logits = TARGET[[t if t < VOCAB_SIZE else 0 for row in rows for t in (3, *row.proposal.token_ids)]]
    out = verify(logits, rows, rng)
    assert all(tokens.num_accepted == 0 for tokens, beyond in zip(out, alien, strict=True) if beyond)
    after = torch.tensor([tokens.token_ids[0] for tokens in out])
    assert transition_pvalue(torch.full((n,), 3), after, distribution(TARGET, SamplingParams())) > 0.001
    greedy = SampleRows(SamplingParams(temperature=0.0), [3], 1, Proposal((VOCAB_SIZE + 1,)))
    assert verify(TARGET[[3, 0]], [greedy])[0].num_accepted == 0


COUPLED = {
    "greedy": SamplingParams(temperature=0.0),
    "seeded": SamplingParams(seed=5),
    "seeded with all there is": SamplingParams(
        temperature=0.8,
        top_k=8,
        top_p=0.95,
        min_p=0.01,
        repetition_penalty=1.1,
        presence_penalty=0.3,
        frequency_penalty=0.2,
        logit_bias={2: 1.0},
        seed=2**64 - 1,
        sequence_index=3,
        min_tokens=10,
        stop_token_ids=frozenset({1}),
    ),
    "greedy with penalties": SamplingParams(temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.5),
}


@pytest.mark.parametrize("params", COUPLED.values(), ids=COUPLED.keys())
def test_coupled_tokens_are_the_same_however_they_are_drafted(params: SamplingParams) -> None:
    length = 60
    plain = [3, 4]
    while len(plain) < length:
        (new,) = verify(TARGET[plain[-1:]], [SampleRows(params, plain, 2)])
        assert new.num_accepted == 0
        plain.extend(new.token_ids)
    rng = torch.Generator().manual_seed(10)
    for num_draft_tokens in range(1, 6):
        tokens, num_accepted = [3, 4], 0
        while len(tokens) < length:
            # Each guess is right more often than not, and the rest is arbitrary.
            right = (plain + [0] * 8)[len(tokens) : len(tokens) + num_draft_tokens]
            arbitrary = torch.randint(VOCAB_SIZE, (num_draft_tokens,), generator=rng).tolist()
            lucky = (torch.rand(num_draft_tokens, generator=rng) < 0.7).tolist()
            guess = tuple(r if luck else a for r, a, luck in zip(right, arbitrary, lucky, strict=True))
            rows = [SampleRows(params, tokens, 2, Proposal(guess))]
            (new,) = verify(target_logits(TARGET, rows), rows)
            num_accepted += new.num_accepted
            tokens.extend(new.token_ids)
        assert tokens[:length] == plain
        assert num_accepted > length / 4


def test_a_seeded_drafter_that_is_the_target_is_always_right() -> None:
    params = COUPLED["seeded with all there is"]
    rng = torch.Generator()
    rows = propose(TARGET, [SampleRows(params, [3, 4, 5, 5], 2)], 5, rng)
    (out,) = verify(target_logits(TARGET, rows), rows)
    assert out.num_accepted == 5
    assert out.token_ids[:5] == rows[0].proposal.token_ids


def test_a_batch_may_mix_rules_and_lengths() -> None:
    rng = torch.Generator().manual_seed(11)
    mixed: list[SampleRows] = []
    for i, params in enumerate([*FILTERS.values(), *COUPLED.values()]):
        for num_draft_tokens in (0, 1, 3):
            row = SampleRows(replace(params, logprobs=i if i % 2 else None), [3, 4, i], 2)
            mixed.extend(propose(TARGET, [row], num_draft_tokens, rng))
    mixed = mixed[::2] + mixed[1::2]
    together = verify(target_logits(TARGET, mixed), mixed, rng)
    for row, out in zip(mixed, together, strict=True):
        assert out.token_ids[: out.num_accepted] == row.proposal.token_ids[: out.num_accepted]
        assert len(out.token_ids) == out.num_accepted + 1
        assert out.candidates is None
        if row.params.coupled:
            assert [out] == verify(target_logits(TARGET, [row]), [row])
        before = [row.token_ids[-1], *out.token_ids]
        if row.params.logprobs is None:
            assert out.logprobs is None
            continue
        assert out.logprobs is not None
        assert len(out.logprobs) == len(out.token_ids)
        for known, token, reported in zip(before, out.token_ids, out.logprobs, strict=False):
            exact = TARGET[known].double().log_softmax(0)
            assert reported.logprob == pytest.approx(float(exact[token]), abs=1e-5)
            best = exact.sort(descending=True)
            assert [token_id for token_id, _ in reported.top] == best.indices[: row.params.logprobs].tolist()
            assert [value for _, value in reported.top] == pytest.approx(
                best.values[: row.params.logprobs].tolist(), abs=1e-5
            )


def test_more_logprobs_than_tokens_report_all_tokens() -> None:
    (out,) = verify(TARGET[[3]], [SampleRows(SamplingParams(temperature=0.0, logprobs=20), [3], 1)])
    assert out.logprobs is not None
    assert len(out.logprobs[0].top) == VOCAB_SIZE


def test_penalties_at_drafted_positions_shape_the_sampled_distribution() -> None:
    """After an accepted draft token the next one is drawn with that token already penalised."""
    n, rng = 8000, torch.Generator().manual_seed(12)
    params = SamplingParams(presence_penalty=2.0, repetition_penalty=1.4)
    certain = Proposal((4,), (1,), struct.pack("<I", 4), struct.pack("<f", 1.0))
    rows = [SampleRows(params, [3], 1, certain)] * n
    model = TARGET.clone()
    model[3, 4] = 10.0
    out = [tokens.token_ids for tokens in verify(target_logits(model, rows), rows, rng)]
    kept = [tokens[1] for tokens in out if len(tokens) == 2]
    assert len(kept) > 0.9 * n
    penalised = model[4].clone()
    for token in (3, 4):
        penalised[token] = penalised[token] / 1.4 if penalised[token] > 0 else penalised[token] * 1.4
    penalised[4] -= 2.0
    probs = penalised.double().softmax(0).expand(VOCAB_SIZE, -1)
    assert transition_pvalue(torch.full((len(kept),), 4), torch.tensor(kept), probs) > 0.001


def test_greedy_rounds_touch_no_filter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(filters, "adjust_logits")
    row = SampleRows(SamplingParams(temperature=0.0), [3], 1, Proposal((int(TARGET[3].argmax()), 0)))
    logits = target_logits(TARGET, [row]).bfloat16()
    (out,) = verify(logits, [row])
    assert out.num_accepted >= 1
    assert out.token_ids[:2] == tuple(logits.argmax(1).tolist()[:2])


GOOD = Proposal((4, 5), (1, 2), struct.pack("<3I", 4, 5, 6), struct.pack("<3f", 1.0, 0.5, 0.5))


@pytest.mark.parametrize(
    ("proposal", "message"),
    [
        (replace(GOOD, candidate_counts=()), r"candidate_counts has 0 entries for 2 draft tokens"),
        (replace(GOOD, candidate_counts=(3,)), r"candidate_counts has 1 entries for 2 draft tokens"),
        (replace(GOOD, candidate_counts=(3, 0)), r"candidate_counts has an entry below 1"),
        (replace(GOOD, candidate_ids=b"1234"), r"candidate_ids has 4 bytes where candidate_counts asks for 12"),
        (replace(GOOD, candidate_probs=b""), r"candidate_probs has 0 bytes where candidate_counts asks for 12"),
    ],
)
def test_a_malformed_proposal_is_named(proposal: Proposal, message: str) -> None:
    row = SampleRows(SamplingParams(), [3], 1, proposal)
    with pytest.raises(ValueError, match=message):
        check_proposal(proposal, row.params)
    with pytest.raises(ValueError, match=message):
        verify(target_logits(TARGET, [row]), [row])


def test_well_formed_proposals_pass() -> None:
    check_proposal(GOOD, SamplingParams())
    check_proposal(EMPTY_PROPOSAL, SamplingParams())
    check_proposal(Proposal((4, 5)), SamplingParams(seed=1))
    # Verified by its own draws.
    check_proposal(Proposal((4, 5)), SamplingParams())
    check_proposal(Proposal((4, 5), parents=(0, 0)), SamplingParams())


@pytest.mark.parametrize("parents", [(), (0, 0, 1, 2, 2)], ids=["chain", "tree"])
@pytest.mark.parametrize("params", FILTERS.values(), ids=FILTERS.keys())
def test_what_says_not_what_it_was_drawn_from_is_verified_by_own_draws(
    params: SamplingParams, parents: tuple[int, ...]
) -> None:
    """Copied tokens, siblings included, beside a sequence whose draft is verified by rejection sampling."""
    n, rng = 6000, torch.Generator().manual_seed(3)
    probs = distribution(TARGET, params)
    likely = TARGET.argsort(1, descending=True)
    first, second = likely[3][:2].tolist()
    tokens = (first, second, likely[first][0].item(), likely[second][0].item(), likely[second][1].item())
    copied = Proposal(tuple(int(token) for token in tokens), parents=parents)
    rows = [SampleRows(params, [3], 1, copied) for _ in range(n)]
    [other] = propose(TARGET, [SampleRows(params, [4], 1)], 2, rng)
    *found, _ = verify(target_logits(TARGET, [*rows, other]), [*rows, other], rng)
    assert sum(each.num_accepted for each in found) > 0.3 * n
    pairs = [pair for each in found for pair in itertools.pairwise((3, *each.token_ids))]
    before, after = torch.tensor(pairs).T
    assert transition_pvalue(before, after, probs) > 0.001
    # As often accepted as it is likely, each sibling of a tree.
    accepted = torch.tensor([each.token_ids[0] for each in found if each.num_accepted])
    expected = probs[3][[first, second]].sum() if parents else probs[3][first]
    assert abs(len(accepted) / n - float(expected)) < 5 * math.sqrt(0.25 / n)


def test_rows_that_do_not_match_the_logits_are_refused() -> None:
    with pytest.raises(ValueError, match="logits has 2 rows where the sequences have 3"):
        verify(TARGET[:2], [SampleRows(SamplingParams(), [3], 1, GOOD)])


def test_an_empty_step_is_empty() -> None:
    assert verify(TARGET[:0], []) == []
