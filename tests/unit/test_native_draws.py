"""Draws by the kernels, against the definition in float64."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from shared.engine.native.draws import NativeDraws
from tests.support.kernels import INSTRUCTION_SETS, kernels

WORD = (1 << 64) - 1
SHAPES = [(1, 1, 1), (3, 7, 7), (2, 16, 5), (5, 1025, 8), (8, 8192, 8), (12, 50_257, 64), (0, 40, 8)]


def noise_of(key: int, vocab_size: int) -> Tensor:
    """By whole numbers that wrap at 64 bits, float64 throughout, and rounded to float32 in the end: nothing of it is
    the project's own."""
    with np.errstate(over="ignore"):
        z = np.uint64(key & WORD) + np.arange(1, vocab_size + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
    uniform = ((z >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    return torch.from_numpy((-np.log(-np.log(uniform))).astype(np.float32).astype(np.float64))


def noisy(scores: Tensor, keys: Sequence[int], temperatures: Sequence[float]) -> Tensor:
    """Logprobs + noise in float64."""
    rows = [
        (row / temperature).log_softmax(0) + noise_of(key, len(row)) if temperature else row
        for row, key, temperature in zip(scores.double(), keys, temperatures, strict=True)
    ]
    return torch.stack(rows) if rows else scores.double()


def some_rows(count: int) -> tuple[list[int], list[float]]:
    """Keys, some alike, as rows of a tree are that predict the same position, and temperatures, some of them 0."""
    dice = random.Random(count)
    keys = [dice.getrandbits(64) - (1 << 63) for _ in range(count)]
    keys[3::3] = keys[:1] * len(keys[3::3])
    return keys, [(1.0, 0.0, 0.7, 1.5)[i % 4] for i in range(count)]


def assert_best(values: Tensor, found: Tensor) -> None:
    """`found` [R, K] are places of the largest of `values` [R, V], best first, but for what float32 cannot tell."""
    best = values.topk(found.shape[1]).values
    torch.testing.assert_close(values.gather(1, found), best, rtol=1e-6, atol=5e-6)
    assert all(len(set(row)) == len(row) for row in found.tolist())


@pytest.fixture(params=INSTRUCTION_SETS)
def native(request: pytest.FixtureRequest) -> NativeDraws:
    return NativeDraws(kernels(request.param))


@pytest.mark.parametrize(("num_rows", "vocab_size", "most"), SHAPES)
@pytest.mark.parametrize("spread", [0.01, 3.0, 400.0])
def test_the_likeliest_are_the_largest_best_first(
    native: NativeDraws, num_rows: int, vocab_size: int, most: int, spread: float
) -> None:
    generator = torch.Generator().manual_seed(vocab_size + num_rows)
    scores = torch.randn((num_rows, vocab_size), generator=generator) * spread
    keys, temperatures = some_rows(num_rows)
    ids, logprobs = native.likeliest(scores, keys, temperatures, most)
    found = torch.tensor(ids, dtype=torch.int64).view(num_rows, most)
    summed = noisy(scores, keys, temperatures)
    assert_best(summed, found)
    expected = summed.log_softmax(1).gather(1, found)
    torch.testing.assert_close(torch.tensor(logprobs).double().view(expected.shape), expected, rtol=2e-6, atol=2e-5)


@pytest.mark.parametrize(("num_rows", "vocab_size"), [shape[:2] for shape in SHAPES])
@pytest.mark.parametrize("spread", [0.01, 3.0, 400.0])
def test_what_is_drawn_has_the_largest_logprob_with_its_noise(
    native: NativeDraws, num_rows: int, vocab_size: int, spread: float
) -> None:
    generator = torch.Generator().manual_seed(vocab_size + num_rows)
    scores, (keys, temperatures) = (
        torch.randn((num_rows, vocab_size), generator=generator) * spread,
        some_rows(num_rows),
    )
    drawn = native.draw(scores, keys, temperatures)
    assert drawn.shape == (num_rows,)
    assert drawn.dtype == torch.int64
    assert_best(noisy(scores, keys, temperatures), drawn.unsqueeze(1))


def test_the_noise_is_the_stream_of_the_key(native: NativeDraws) -> None:
    """Of scores that are all the same it decides the order, of each and every one."""
    for key in (0, 5, -1, -(1 << 63)):
        ids, logprobs = native.likeliest(torch.zeros(1, 5000), [key], [1.0], 5000)
        expected = noise_of(key, 5000)
        assert ids[0] == expected.argsort(descending=True, stable=True).tolist()
        torch.testing.assert_close(
            torch.tensor(logprobs[0]).double(), expected[ids[0]] - expected.logsumexp(0), rtol=2e-6, atol=5e-6
        )


def test_what_was_looked_at_is_drawn_by(native: NativeDraws) -> None:
    """Whatever was asked for between: more positions than are kept, at once and one after another, other vocabularies,
    and some known with some that are not."""
    dice, generator = random.Random(3), torch.Generator().manual_seed(3)
    positions = [dice.getrandbits(64) - (1 << 63) for _ in range(700)]
    noise = {key: noise_of(key, 90) for key in positions}
    for vocab_size, count in ((40, 3), (40, 700), (90, 5), (40, 600), (90, 701), (8, 1), (40, 64)):
        for _ in range(20):
            keys = dice.choices(positions, k=count)
            scores = torch.randn((count, vocab_size), generator=generator)
            summed = scores.double().log_softmax(1) + torch.stack([noise[key][:vocab_size] for key in keys])
            assert_best(summed, native.draw(scores, keys, [1.0] * count).unsqueeze(1))
            assert_best(summed, torch.tensor(native.likeliest(scores, keys, [1.0] * count, 2)[0]))


def test_a_row_is_drawn_the_same_whoever_is_beside_it(native: NativeDraws) -> None:
    """To the last bit, and where others' scores were divided by their temperatures before, so that its own moved."""
    scores = torch.randn((9, 3000), generator=torch.Generator().manual_seed(2)) * 4
    keys, _ = some_rows(9)
    moved = scores - scores.amax(1, keepdim=True)
    for temperature in (1.0, 0.3, 1.7):
        together = native.draw(scores, keys, [temperature] * 9).tolist()
        assert [int(native.draw(scores[i : i + 1], keys[i : i + 1], [temperature])) for i in range(9)] == together
        assert native.draw(moved / temperature, keys, [1.0] * 9).tolist() == together


def test_of_equals_the_first_come_first(native: NativeDraws) -> None:
    dice = random.Random(1)
    scores = torch.tensor([[float(dice.randrange(3)) for _ in range(100)] for _ in range(20)])
    greedy = [0] * 20, [0.0] * 20
    ids, _ = native.likeliest(scores, *greedy, 50)
    assert ids == scores.sort(dim=1, descending=True, stable=True).indices[:, :50].tolist()
    assert native.draw(scores, *greedy).tolist() == [row[0] for row in ids]


@pytest.mark.parametrize("vocab_size", [3, 40])
@pytest.mark.parametrize("temperature", [0.0, 1.0, 0.5])
def test_what_is_filtered_out_is_never_found(native: NativeDraws, vocab_size: int, temperature: float) -> None:
    """Nor does it count: the rest are all there is. And rows that are no numbers have none."""
    scores = torch.full((3, vocab_size), -math.inf)
    scores[0, 2], scores[0, 0] = 1.0, 9.0
    scores[2] = math.nan
    rows = [7] * 3, [temperature] * 3
    ids, logprobs = native.likeliest(scores, *rows, 3)
    summed = noisy(scores[:1], [7], [temperature])[0]
    assert ids[0][:2] == [0, 2]
    assert logprobs[0][:2] == pytest.approx(summed.log_softmax(0)[[0, 2]].tolist(), abs=1e-5)
    assert not any(map(math.isfinite, logprobs[0][2:] + logprobs[1] + logprobs[2]))
    assert native.draw(scores, *rows).tolist() == [0, 0, 0]


@pytest.mark.parametrize("vocab_size", [1, 7, 16, 1025, 50_257])
@pytest.mark.parametrize("spread", [0.01, 3.0, 400.0])
@pytest.mark.parametrize("temperature", [1.0, 0.4])
def test_without_a_seed_it_is_the_inverse_of_what_is_cumulated(
    native: NativeDraws, vocab_size: int, spread: float, temperature: float
) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    scores = torch.randn((300, vocab_size), generator=generator) * spread
    uniforms = torch.rand(300, dtype=torch.float64, generator=generator)
    uniforms[:4] = torch.tensor([0.0, 1 - 2.0**-53, 0.5, 2.0**-53])
    scores[::3, vocab_size // 3 + 1 :] = -math.inf  # whole parts of a row, or its end
    scores[1::3, : vocab_size // 3] = -math.inf
    drawn = native.draw_unseeded(scores, [temperature] * 300, uniforms).unsqueeze(1)
    probs = (scores.double() / temperature).softmax(1)
    cumulated = probs.cumsum(1)
    assert (probs.gather(1, drawn) > 0).all()
    assert (cumulated.gather(1, drawn).squeeze(1) >= uniforms - 2e-6).all()
    assert ((cumulated - probs).gather(1, drawn).squeeze(1) <= uniforms + 2e-6).all()


def test_without_a_seed_what_rounding_leaves_is_the_last_that_may_be(native: NativeDraws) -> None:
    """Never one that was filtered out, however little all of the others seem to weigh together."""
    generator = torch.Generator().manual_seed(5)
    scores = torch.randn((2000, 5000), generator=generator)
    scores[:, 3000:] = -math.inf
    uniforms = torch.full((2000,), 1 - 2.0**-53, dtype=torch.float64)
    drawn = native.draw_unseeded(scores, [1.0] * 2000, uniforms)
    assert int(drawn.max()) <= 2999
    assert int(drawn.min()) >= 2980
    no_numbers = torch.full((1, 40), math.nan)
    assert native.draw_unseeded(no_numbers, [1.0], uniforms[:1]).tolist() == [39]


@pytest.mark.parametrize("num_parts", [1, 3])
def test_without_a_seed_what_rounding_leaves_of_a_part_is_not_its_last_tokens(
    native: NativeDraws, num_parts: int
) -> None:
    """Many that weigh little beside few that weigh much, whose sum of floats is too large by some millionths."""
    scores = torch.full((1, 1024), math.log(6.1e-8))
    scores[0, :16], scores[0, -1] = 0.0, -80.0
    scores = scores.repeat(1, num_parts)
    ends = [(part + 1) / num_parts for part in range(num_parts)]
    uniforms = torch.tensor([end - 10.0**-i for i in range(5, 9) for end in ends], dtype=torch.float64)
    drawn = native.draw_unseeded(scores.expand(len(uniforms), -1), [1.0] * len(uniforms), uniforms)
    assert (drawn % 1024 != 1023).all()


@pytest.mark.parametrize("place", [0, 7, 17, 38])
def test_a_greedy_row_that_is_no_numbers_is_drawn_as_it_is_alone(native: NativeDraws, place: int) -> None:
    """Where NumPy, which finds what is largest of steps that are greedy throughout, has it."""
    scores = torch.randn((1, 40), generator=torch.Generator().manual_seed(1))
    scores[0, place] = scores[0, 39] = math.nan
    assert native.draw(scores, [0], [0.0]).tolist() == scores.numpy().argmax(1).tolist() == [place]


def test_scores_may_lie_apart_in_memory() -> None:
    native = NativeDraws(kernels(INSTRUCTION_SETS[0]))
    scores, rows = torch.randn((40, 6), generator=torch.Generator().manual_seed(1)), some_rows(6)
    assert native.likeliest(scores.T, *rows, 5) == native.likeliest(scores.T.contiguous(), *rows, 5)
    assert torch.equal(native.draw(scores.T, *rows), native.draw(scores.T.contiguous(), *rows))
