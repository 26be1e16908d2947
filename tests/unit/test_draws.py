"""Draft tokens drawn for several steps: what one step after another would draw."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from services.draft.draws import draw_ahead
from services.draft.proposer import draw
from shared.sampling import noise
from shared.sampling.noise import noise_of
from shared.sampling.params import SamplingParams
from shared.sampling.rows import SampleRows
from shared.sampling.sampled import SampledTokens

GREEDY = SamplingParams(temperature=0.0)
SEEDED = SamplingParams(seed=4, temperature=0.8)
FILTERED = SamplingParams(seed=(1 << 64) - 3, sequence_index=2, top_k=40, top_p=0.9, min_p=0.02)
UNSEEDED = SamplingParams(temperature=0.9)
UNSEEDED_FILTERED = SamplingParams(top_k=30, top_p=0.7)
VOCAB_SIZE = 300
NUM_STEPS = 6
CPU = torch.device("cpu")


def logits_of(step: int, num_rows: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(step)) * 2).to(dtype)


def one_by_one(params: list[SamplingParams], dtype: torch.dtype) -> list[list[SampledTokens]]:
    generator = torch.Generator().manual_seed(9)
    texts = [[1, 2, 3 + i] for i in range(len(params))]
    steps = []
    for step in range(NUM_STEPS):
        rows = [SampleRows(each, text, 2) for each, text in zip(params, texts, strict=True)]
        steps.append(draw(logits_of(step, len(params), dtype), rows, 0.9, 50, generator))
        for text, sampled in zip(texts, steps[-1], strict=True):
            text += sampled.token_ids
    return steps


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "params",
    [
        [GREEDY],
        [GREEDY] * 3,
        [SEEDED],
        [FILTERED, SEEDED, SEEDED],
        [GREEDY, SEEDED, FILTERED, GREEDY],
        [UNSEEDED],
        [UNSEEDED_FILTERED, UNSEEDED],
        [UNSEEDED, GREEDY, SEEDED, UNSEEDED_FILTERED, FILTERED],
        [UNSEEDED, GREEDY],
    ],
)
def test_several_steps_draw_what_one_after_another_does(params: list[SamplingParams], dtype: torch.dtype) -> None:
    rows = [SampleRows(each, [1, 2, 3 + i], 2) for i, each in enumerate(params)]
    draws = draw_ahead(rows, NUM_STEPS, VOCAB_SIZE, CPU, 0.9, 50, torch.Generator().manual_seed(9))
    assert draws is not None
    drawn = [draws.draw(logits_of(step, len(params), dtype)) for step in range(NUM_STEPS)]
    steps = draws.take()
    assert [[each.token_ids for each in step] for step in steps] == [[(i,) for i in ids.tolist()] for ids in drawn]
    for step, expected in zip(steps, one_by_one(params, dtype), strict=True):
        for ours, theirs in zip(step, expected, strict=True):
            assert ours._replace(candidates=None) == theirs._replace(candidates=None)
            if ours.candidates is None or theirs.candidates is None:
                assert ours.candidates is theirs.candidates is None
                continue
            assert ours.candidates[:2] == theirs.candidates[:2]
            # Sums of more zeros are rounded otherwise.
            probs, others = (
                np.frombuffer(each.probs, dtype=np.float32) for each in (ours.candidates, theirs.candidates)
            )
            np.testing.assert_allclose(probs, others, rtol=1e-6)


def test_nothing_is_waited_for_until_they_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    params = [UNSEEDED, GREEDY, SEEDED, UNSEEDED_FILTERED, FILTERED]
    draws = draw_ahead([SampleRows(each, [1, 2], 2) for each in params], 2, VOCAB_SIZE, CPU)
    assert draws is not None

    def refuse(*_: object) -> None:
        raise AssertionError("what the device computes is asked for")

    with monkeypatch.context() as patch:
        for name in ("item", "tolist", "cpu", "nonzero", "__int__", "__float__", "__bool__"):
            patch.setattr(Tensor, name, refuse)
        for name in ("tensor", "as_tensor", "from_numpy"):  # what the host has to send would be waited for, too
            patch.setattr(torch, name, refuse)
        patch.setattr("services.draft.draws.argmax", lambda values: values.argmax(1))  # as a device's
        on_device = lambda keys, vocab_size: noise._gumbel(noise._torch_bits(keys, vocab_size)).float()  # noqa: E731
        patch.setattr("services.draft.draws.noise_of", on_device)
        for step in range(2):
            draws.draw(logits_of(step, len(params)))
    assert len(draws.take()) == 2


@pytest.mark.parametrize(
    "changed",
    [
        SampleRows(SamplingParams(presence_penalty=0.1), [1], 1),
        SampleRows(SamplingParams(logit_bias={3: 1.0}), [1], 1),
        SampleRows(SamplingParams(min_tokens=3, stop_token_ids=frozenset([0])), [1], 1),
        SampleRows(GREEDY, [1], 1, num_children=4),
    ],
)
def test_what_depends_on_more_than_a_steps_logits_is_not_drawn_ahead(changed: SampleRows) -> None:
    assert draw_ahead([SampleRows(GREEDY, [1], 1)], 3, VOCAB_SIZE, CPU) is not None
    assert draw_ahead([SampleRows(GREEDY, [1], 1), changed], 3, VOCAB_SIZE, CPU) is None


def test_what_is_no_number_harms_nobody_else() -> None:
    params = [UNSEEDED, SEEDED, GREEDY, UNSEEDED]
    draws = draw_ahead([SampleRows(each, [1, 2, 3], 2) for each in params], 1, VOCAB_SIZE, CPU)
    assert draws is not None
    logits = logits_of(0, 4)
    logits[0] = torch.nan
    assert 0 <= int(draws.draw(logits)[0]) < VOCAB_SIZE
    _, seeded, greedy, unseeded = draws.take()[0]
    assert greedy.token_ids == (int(logits[2].argmax()),)
    assert seeded == draw(logits[1:2], [SampleRows(SEEDED, [1, 2, 3], 2)])[0]
    assert unseeded.candidates is not None
    assert unseeded.candidates.num_entries > 1


def test_keys_are_the_noise_of_their_positions() -> None:
    """The same keys, whatever the number of rows."""
    keys = torch.tensor([5, -7, 1 << 62])
    together = noise_of(keys, 40)
    for i in range(3):
        assert torch.equal(noise_of(keys[i : i + 1], 40)[0], together[i])
