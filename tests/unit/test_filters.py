"""The request's filters, against transformers' logits processors and the OpenAI formula."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from shared.sampling.coupled import draw_coupled
from shared.sampling.filters import adjust_logits, sampling_logprobs
from shared.sampling.params import SamplingParams
from shared.sampling.proposal import Proposal
from shared.sampling.rows import SampleRows
from shared.sampling.token_counts import TokenCounts

VOCAB_SIZE = 300
PROMPT = (5, 9, 9, 250, 17)
OUTPUT = (9, 40, 41, 40)
DRAFT = (40, 7, 41)


def random_logits(num_rows: int, vocab_size: int = VOCAB_SIZE, seed: int = 0) -> Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3


def sequence(params: SamplingParams, draft: Sequence[int] = DRAFT) -> SampleRows:
    return SampleRows(params, [*PROMPT, *OUTPUT], len(PROMPT), Proposal(tuple(draft)))


def adjusted_by_oracle(logits: Tensor, params: SamplingParams, tokens: Sequence[int]) -> Tensor:
    """One row [V] after `tokens`, by transformers' processors and the OpenAI formula."""
    processors: Any = LogitsProcessorList()
    input_ids = torch.tensor([tokens])
    scores = logits.float().unsqueeze(0)
    if params.repetition_penalty != 1.0:
        processors.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    scores = processors(input_ids, scores).clone()
    for token, count in Counter(tokens[len(PROMPT) :]).items():
        scores[0, token] -= params.presence_penalty + count * params.frequency_penalty
    processors = LogitsProcessorList()
    if params.logit_bias:
        processors.append(SequenceBiasLogitsProcessor([[[token], bias] for token, bias in params.logit_bias.items()]))
    if params.min_tokens:
        stop_ids = sorted(params.stop_token_ids)
        processors.append(MinNewTokensLengthLogitsProcessor(len(PROMPT), params.min_tokens, stop_ids))
    result: Tensor = processors(input_ids, scores)[0]
    return result


ADJUSTMENTS = {
    "repetition": SamplingParams(repetition_penalty=1.7),
    "repetition below one": SamplingParams(repetition_penalty=0.6),
    "presence": SamplingParams(presence_penalty=1.3),
    "frequency": SamplingParams(frequency_penalty=-0.7),
    "bias": SamplingParams(logit_bias={3: 5.0, 40: -100.0}),
    "min_tokens": SamplingParams(min_tokens=6, stop_token_ids=frozenset({1, 2})),
    "all": SamplingParams(
        repetition_penalty=1.2,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        logit_bias={9: 1.5, 2: 4.0},
        min_tokens=5,
        stop_token_ids=frozenset({2}),
    ),
}


@pytest.mark.parametrize("params", ADJUSTMENTS.values(), ids=ADJUSTMENTS.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_drafted_position_is_adjusted_as_if_tokens_came_one_by_one(
    params: SamplingParams, dtype: torch.dtype
) -> None:
    logits = random_logits(1 + len(DRAFT)).to(dtype)
    original = logits.clone()
    got = adjust_logits(logits, [sequence(params)])
    assert got.dtype == torch.float32
    for j in range(1 + len(DRAFT)):
        expected = adjusted_by_oracle(logits[j], params, [*PROMPT, *OUTPUT, *DRAFT[:j]])
        torch.testing.assert_close(got[j], expected, rtol=0, atol=1e-5)
    assert torch.equal(logits, original)


def test_drafted_rows_equal_plain_decoding_to_the_bit() -> None:
    params = ADJUSTMENTS["all"]
    logits = random_logits(1 + len(DRAFT))
    together = adjust_logits(logits, [sequence(params)])
    for j in range(1 + len(DRAFT)):
        alone = SampleRows(params, [*PROMPT, *OUTPUT, *DRAFT[:j]], len(PROMPT))
        assert torch.equal(adjust_logits(logits[j : j + 1], [alone])[0], together[j])


def test_sequences_of_a_batch_keep_to_their_own_rows() -> None:
    chosen = [sequence(params) for params in ADJUSTMENTS.values()]
    chosen[2:2] = [sequence(SamplingParams(), draft=(1,))]
    logits = random_logits(sum(rows.num_rows for rows in chosen))
    got = adjust_logits(logits, chosen)
    first = 0
    for rows in chosen:
        part = slice(first, first + rows.num_rows)
        assert torch.equal(got[part], adjust_logits(logits[part], [rows]))
        first += rows.num_rows
    assert torch.equal(got[8:10], logits[8:10])


class Unread(Sequence[int]):
    """A history whose length may be asked for and nothing else."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        raise AssertionError("the history is read")


@pytest.mark.parametrize("params", ADJUSTMENTS.values(), ids=ADJUSTMENTS.keys())
def test_a_history_that_is_counted_is_not_read(params: SamplingParams) -> None:
    tokens = [*PROMPT, *OUTPUT]
    counts = TokenCounts(PROMPT, len(PROMPT))
    counts.add((7, *OUTPUT, 5))
    counts.remove((5, 7))
    logits = random_logits(1 + len(DRAFT))
    counted = SampleRows(params, Unread(len(tokens)), len(PROMPT), Proposal(DRAFT), counts)
    assert torch.equal(adjust_logits(logits, [counted]), adjust_logits(logits, [sequence(params)]))
    assert (Counter(counts.ids), len(counts.output_counts)) == (Counter({*PROMPT, *OUTPUT}), len(counts.ids))


def test_a_repetition_penalty_near_zero_makes_no_infinities() -> None:
    params = SamplingParams(repetition_penalty=1e-40)
    logits = random_logits(1)
    got = sampling_logprobs(logits, [sequence(params, draft=())]).exp()
    raised = [token for token in {*PROMPT, *OUTPUT} if logits[0, token] > 0]
    assert len(raised) > 1
    assert got[0].nonzero().flatten().tolist() == sorted(raised)
    torch.testing.assert_close(got[0, raised], torch.full((len(raised),), 1 / len(raised)))


def test_nothing_to_adjust_is_no_work() -> None:
    logits = random_logits(4)
    passed = SamplingParams(min_tokens=4, stop_token_ids=frozenset({1}))
    assert adjust_logits(logits, [sequence(SamplingParams(), draft=(3,)), sequence(passed, draft=(3,))]) is logits


def test_token_ids_beyond_the_vocabulary_are_passed_over() -> None:
    params = replace(
        ADJUSTMENTS["all"], logit_bias={VOCAB_SIZE: 50.0, 9: 1.5, 2: 4.0}, stop_token_ids=frozenset({2, 999})
    )
    with_alien = SampleRows(params, [*PROMPT, *OUTPUT, VOCAB_SIZE], len(PROMPT))
    without = SampleRows(replace(params, logit_bias={9: 1.5, 2: 4.0}), [*PROMPT, *OUTPUT, 0], len(PROMPT))
    logits = random_logits(1)
    got, expected = adjust_logits(logits, [with_alien]), adjust_logits(logits, [without])
    assert torch.equal(got[:, 1:], expected[:, 1:])
    assert got[0, 0] == logits[0, 0]


FILTERS = {
    "none": SamplingParams(),
    "temperature": SamplingParams(temperature=0.6),
    "top_k": SamplingParams(top_k=7),
    "top_k of one": SamplingParams(top_k=1),
    "top_k beyond the vocabulary": SamplingParams(top_k=10 * VOCAB_SIZE),
    "top_p": SamplingParams(top_p=0.85),
    "tiny top_p": SamplingParams(top_p=1e-6),
    "min_p": SamplingParams(min_p=0.05),
    "min_p of one": SamplingParams(min_p=1.0),
    "all": SamplingParams(temperature=1.4, top_k=40, top_p=0.8, min_p=0.02),
}


def warped_by_oracle(logits: Tensor, params: SamplingParams) -> Tensor:
    warpers: Any = LogitsProcessorList()
    if params.temperature != 1.0:
        warpers.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        warpers.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        warpers.append(MinPLogitsWarper(params.min_p))
    result: Tensor = warpers(torch.zeros(len(logits), 1, dtype=torch.int64), logits.float()).log_softmax(1)
    return result


def assert_same_distribution(got: Tensor, expected: Tensor) -> None:
    assert torch.equal(got.isneginf(), expected.isneginf())
    torch.testing.assert_close(got.exp(), expected.exp(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("params", FILTERS.values(), ids=FILTERS.keys())
def test_filters_have_the_meaning_they_have_in_transformers(params: SamplingParams) -> None:
    logits = random_logits(8)
    got = sampling_logprobs(logits, [sequence(params)] * 2)
    assert_same_distribution(got, warped_by_oracle(logits, params))


def test_each_row_of_a_batch_gets_its_own_filters() -> None:
    chosen = [sequence(params) for params in FILTERS.values()]
    logits = random_logits(4 * len(chosen), seed=1)
    got = sampling_logprobs(logits, chosen)
    for i, params in enumerate(FILTERS.values()):
        part = slice(4 * i, 4 * i + 4)
        assert_same_distribution(got[part], warped_by_oracle(logits[part], params))


def test_a_nucleus_is_right_whether_narrow_or_wide() -> None:
    logits = random_logits(2, vocab_size=5000, seed=2)
    logits[1] *= 0.01  # nearly flat: its nucleus is most of the vocabulary
    params = SamplingParams(top_p=0.9)
    got = sampling_logprobs(logits, [sequence(params, draft=(1,))])
    wide = int(got[1].isfinite().sum())
    assert wide > 4000
    assert_same_distribution(got[:1], warped_by_oracle(logits[:1], params))
    # In a flat row float32 sums can put the border a token off.
    assert abs(wide - int(warped_by_oracle(logits[1:], params).isfinite().sum())) <= 2


def test_a_nucleus_is_the_same_whoever_is_beside_it_and_however_many_threads_look_for_it() -> None:
    """To the last bit: of tokens that are about as likely as one another, it ends where rounding has it end."""
    generator = torch.Generator().manual_seed(3)
    near = 20 + 1e-6 * torch.randn((500, 4), generator=generator)
    wide = torch.randn((12, 152_064), generator=generator)
    for logits, top_p in ((near, 0.75), (wide, 0.95)):
        row = sequence(SamplingParams(top_p=top_p), [])
        alone = torch.cat([sampling_logprobs(logits[i : i + 1], [row]) for i in range(len(logits))])
        beside = sequence(SamplingParams(temperature=0.5), [])
        rows = torch.cat([logits, logits[:1]])
        for num_threads in (1, 2, 4):
            before = torch.get_num_threads()
            torch.set_num_threads(num_threads)
            try:
                together = sampling_logprobs(rows, [*[row] * len(logits), beside])[:-1]
                again = sampling_logprobs(logits[:1], [row])
            finally:
                torch.set_num_threads(before)
            assert torch.equal(together, alone)
            assert torch.equal(again, alone[:1])


def test_tied_tokens_stay_or_go_together() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0, 2.0, 0.0]])
    for params in (SamplingParams(top_k=2), SamplingParams(top_p=0.5)):
        kept = sampling_logprobs(logits, [sequence(params, draft=())]).isfinite()
        assert kept.tolist() == [[False, True, True, True, True, False]]


def test_only_rows_that_need_it_are_sorted(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("sorted")

    monkeypatch.setattr(Tensor, "sort", refuse)
    sampling_logprobs(random_logits(4), [sequence(SamplingParams(temperature=0.5, top_k=5, min_p=0.1))])
    monkeypatch.setattr(Tensor, "topk", refuse)
    sampling_logprobs(random_logits(4), [sequence(SamplingParams(temperature=0.5, min_p=0.1))])


def test_greedy_rows_keep_the_argmax_that_a_softmax_would_tie() -> None:
    greedy = replace(ADJUSTMENTS["presence"], temperature=0.0, top_k=1)
    # The two best differ by one unit in the last place, which log_softmax over this row rounds away.
    logits = torch.full((5, VOCAB_SIZE), 0.9)
    logits[:, 100] = 1.0
    logits[:, 200] = torch.nextafter(torch.tensor(1.0), torch.tensor(2.0))
    assert logits.log_softmax(1)[0].argmax() == 100
    got = sampling_logprobs(logits, [sequence(greedy), sequence(SamplingParams(top_k=3), draft=())])
    assert got[:4].argmax(1).tolist() == [200] * 4
    assert math.isclose(float(got[4].exp().sum()), 1.0, rel_tol=1e-5)


@pytest.mark.parametrize("temperature", [0.0, 1e-40, 1e-30, 1e-7, 1e-6, float(torch.tensor(1e-6))])
@pytest.mark.parametrize("seed", [None, 3])
def test_up_to_a_millionth_temperatures_are_greedy(temperature: float, seed: int | None) -> None:
    params = SamplingParams(temperature=temperature, seed=seed)
    assert params.greedy
    assert params.coupled
    logits = random_logits(4) * 1e-5  # so near one another that a sampled token would often be another
    rows = [sequence(params)]
    assert not sampling_logprobs(logits, rows).isnan().any()
    assert draw_coupled(logits, rows).tolist() == logits.argmax(1).tolist()


@pytest.mark.parametrize("temperature", [1.1e-6, 1e-5, 1e-3])
def test_low_temperatures_are_sampled_and_stay_numbers(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, top_k=50, top_p=0.9, min_p=0.01)
    assert not params.greedy
    extreme = torch.tensor([[3e38, 1e38, 0.0, -3e38], [1e34, 1e34, -1e34, 3.0], [-3e38, -3e38, -3e38, -3.3e38]])
    got = sampling_logprobs(extreme, [sequence(params, draft=(1, 2))])
    assert got.exp().tolist() == [[1, 0, 0, 0], [0.5, 0.5, 0, 0], pytest.approx([1 / 3, 1 / 3, 1 / 3, 0])]
    # What lies within a temperature of one another shares the probability.
    near = torch.tensor([[0.0, temperature, -temperature]])
    expected = torch.tensor([[0.0, 1.0, -1.0]]).softmax(1)
    got = sampling_logprobs(near, [sequence(SamplingParams(temperature=temperature), draft=())])
    torch.testing.assert_close(got.exp(), expected, rtol=1e-5, atol=1e-6)
