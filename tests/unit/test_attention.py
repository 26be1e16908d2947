"""Paged attention of ragged steps: exact against a dense reference, at a cost that follows the sum of contexts."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from shared.engine.attention import batch as batch_module
from shared.engine.attention import paged
from shared.engine.attention.batch import AttentionBatch
from shared.engine.attention.paged import attend
from shared.engine.kv_pool import KVPool, KVShape
from shared.engine.native.library import Library
from tests.support.kernels import INSTRUCTION_SETS, kernels
from tests.support.threads import threads

BLOCK_SIZE = 16
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 6, 2, 8
SCALE = 0.3
CPU = torch.device("cpu")

# (context, new tokens) of each sequence: decodes, verifications and prefill chunks, one context far longer.
MIXED = [
    (900, 1),
    *((30 + i, 1) for i in range(8)),
    (17, 5),
    (200, 9),
    (16, 16),
    (300, 40),
    (25, 25),
    (700, 90),
    (1, 1),
]


class Case(NamedTuple):
    """Sequences whose KV but for the newest tokens' is in the pool already."""

    pool: KVPool
    starts: list[int]
    lengths: list[int]
    tables: list[list[int]]
    keys: list[Tensor]
    values: list[Tensor]
    query: Tensor

    def batch(self, library: Library | None = None) -> AttentionBatch:
        return AttentionBatch.build(self.pool, self.starts, self.lengths, self.tables, library)

    def newest(self) -> tuple[Tensor, Tensor]:
        """Keys and values of the step's own tokens, packed."""
        key = torch.cat([key[start:] for key, start in zip(self.keys, self.starts, strict=True)])
        value = torch.cat([value[start:] for value, start in zip(self.values, self.starts, strict=True)])
        return key, value


def make_case(contexts: list[tuple[int, int]], value_dim: int = HEAD_DIM) -> Case:
    """Random keys, values and queries in blocks in random order, with large numbers in what nobody owns."""
    generator = torch.Generator().manual_seed(0)

    def randn(*size: int) -> Tensor:
        return torch.randn(size, generator=generator)

    num_blocks = [-(-context // BLOCK_SIZE) for context, _ in contexts]
    pool = KVPool(KVShape(1, NUM_KV_HEADS, HEAD_DIM, value_dim), sum(num_blocks) + 1, BLOCK_SIZE, torch.float32, CPU)
    pool.data.fill_(1e3)
    order = torch.randperm(sum(num_blocks), generator=generator).tolist()
    tables = [[order.pop() for _ in range(count)] for count in num_blocks]
    keys = [randn(context, NUM_KV_HEADS, HEAD_DIM) for context, _ in contexts]
    values = [randn(context, NUM_KV_HEADS, value_dim) for context, _ in contexts]
    for table, key, value in zip(tables, keys, values, strict=True):
        for position in range(len(key)):
            slot = pool.data[table[position // BLOCK_SIZE], 0, :, position % BLOCK_SIZE]
            slot[0, :, :HEAD_DIM], slot[1, :, :value_dim] = key[position], value[position]
    return Case(
        pool,
        [context - length for context, length in contexts],
        [length for _, length in contexts],
        tables,
        keys,
        values,
        randn(sum(length for _, length in contexts), NUM_HEADS, HEAD_DIM),
    )


def dense_attention(
    case: Case, sliding_window: int | None = None, softcap: float | None = None, sinks: Tensor | None = None
) -> Tensor:
    """Token by token and head by head, as the definition says, in float64."""
    rows = []
    token = 0
    for start, length, keys, values in zip(case.starts, case.lengths, case.keys, case.values, strict=True):
        for position in range(start, start + length):
            first = 0 if sliding_window is None else max(0, position - sliding_window + 1)
            heads = []
            for head in range(NUM_HEADS):
                kv_head = head * NUM_KV_HEADS // NUM_HEADS
                seen = slice(first, position + 1)
                scores = keys[seen, kv_head].double() @ case.query[token, head].double() * SCALE
                if softcap is not None:
                    scores = (scores / softcap).tanh() * softcap
                if sinks is not None:
                    scores = torch.cat([scores, sinks[head : head + 1].double()])
                weights = scores.softmax(0)[: position + 1 - first]
                heads.append(weights @ values[seen, kv_head].double())
            rows.append(torch.stack(heads))
            token += 1
    return torch.stack(rows)


FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"sliding_window": 21},
    "window of one block": {"sliding_window": 16},
    "window longer than any context": {"sliding_window": 5000},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": torch.linspace(-1, 3, NUM_HEADS)},
    "all": {"sliding_window": 100, "softcap": 1.5, "sinks": torch.linspace(-1, 3, NUM_HEADS)},
}


@pytest.mark.parametrize("value_dim", [HEAD_DIM, 4])
@pytest.mark.parametrize("tight", [False, True], ids=["roomy", "tight"])
@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES.keys())
def test_a_ragged_step_attends_as_the_definition_says(
    features: dict[str, Any], tight: bool, value_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if tight:  # nothing pays to pad, groups of little, pieces of single queries, masks made anew
        monkeypatch.setattr(batch_module, "_CPU_LIMITS", batch_module._Limits(launch=0, gathered=1 << 13))
        monkeypatch.setattr(batch_module, "_MAX_KEPT_PAIRS", 100)
        monkeypatch.setattr(paged, "_MAX_SCORE_BYTES", 1 << 14)
    case = make_case(MIXED, value_dim)
    batch = case.batch()
    key, value = case.newest()
    expected = dense_attention(case, **features)
    for _ in range(2):  # another layer may use masks again
        got = attend(0, case.query, key, value, batch, SCALE, **features)
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)
    assert len(batch.groups) > (9 if tight else 1)


@pytest.mark.parametrize("value_dim", [HEAD_DIM, 4])
@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES.keys())
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_kernels_attend_as_the_definition_says(instruction_set: str, features: dict[str, Any], value_dim: int) -> None:
    case = make_case(MIXED, value_dim)
    case.pool.data[sum(map(len, case.tables))] = torch.nan  # a block that is nobody's
    for table, key in zip(case.tables, case.keys, strict=True):  # and the rest of last ones
        case.pool.data[table[-1], :, :, (len(key) - 1) % BLOCK_SIZE + 1 :] = torch.nan
    got = attend(0, case.query, *case.newest(), case.batch(kernels(instruction_set)), SCALE, **features)
    torch.testing.assert_close(got.double(), dense_attention(case, **features), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_chunks_of_long_contexts_are_put_together_again(instruction_set: str, num_threads: int) -> None:
    case = make_case([(5000, 1), (1537, 70), (513, 2), (512, 512)])
    expected = dense_attention(case, sliding_window=1400)
    with threads(num_threads):
        step = case.batch(kernels(instruction_set))
        for _ in range(2):  # as layers follow one another
            got = attend(0, case.query, *case.newest(), step, SCALE, sliding_window=1400)
            torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_kernels_write_what_torch_writes(instruction_set: str) -> None:
    """Not-a-numbers and infinities become 0, and nothing beside the new tokens' places changes."""
    ours, torchs = make_case([(20, 3), (40, 40)], value_dim=4), make_case([(20, 3), (40, 40)], value_dim=4)
    key, value = ours.newest()
    key[1, 0, 2], key[5, 1, 0], value[0, 1, 3] = torch.nan, torch.inf, -torch.inf
    attend(0, ours.query, key, value, ours.batch(kernels(instruction_set)), SCALE)
    attend(0, torchs.query, key, value, torchs.batch(), SCALE)
    # Torch fills values up with zeros to the size of the keys.
    assert torch.equal(ours.pool.data[:, :, 0], torchs.pool.data[:, :, 0])
    assert torch.equal(ours.pool.data[:, :, 1, ..., :4], torchs.pool.data[:, :, 1, ..., :4])


def bare_batch(contexts: list[int], lengths: list[int], shape: KVShape) -> AttentionBatch:
    """A step over a pool of one block, which stands in every table: only shapes matter."""
    pool = KVPool(shape, 1, BLOCK_SIZE, torch.bfloat16, CPU)
    tables = [[0] * -(-context // BLOCK_SIZE) for context in contexts]
    starts = [context - length for context, length in zip(contexts, lengths, strict=True)]
    return AttentionBatch.build(pool, starts, lengths, tables)


def num_gathered(batch: AttentionBatch) -> int:
    """KV positions that a layer gathers, padding included."""
    return sum(len(group.query_index) * group.num_kv_positions for group in batch.groups)


SHAPE = KVShape(1, 4, 64, 64)  # 1 KiB a position


def test_one_long_context_makes_nobody_else_dear() -> None:
    alone = num_gathered(bare_batch([16384], [1], SHAPE))
    short = num_gathered(bare_batch([256] * 31, [1] * 31, SHAPE))
    assert (alone, short) == (16384, 31 * 256)
    assert num_gathered(bare_batch([*[256] * 31, 16384], [1] * 32, SHAPE)) == alone + short


def test_equal_decodes_are_one_group_without_padding() -> None:
    (group,) = bare_batch([256] * 32, [1] * 32, SHAPE).groups
    assert group.token_index is None
    assert not group.padded
    assert group.blocks.shape == (32, 16)


@pytest.mark.parametrize("seed", range(20))
def test_padding_stays_within_a_factor_whatever_the_mix(seed: int) -> None:
    rng = random.Random(seed)
    contexts = [int(2 ** rng.uniform(0, 14)) for _ in range(rng.randint(1, 100))]
    lengths = [min(context, rng.choice([1, 1, 1, 5, 9, rng.randint(1, 64)])) for context in contexts]
    batch = bare_batch(contexts, lengths, SHAPE)
    own = sum(-(-context // BLOCK_SIZE) * BLOCK_SIZE for context in contexts)
    assert num_gathered(batch) <= 2 * own + 8192
    pairs = sum(context * length for context, length in zip(contexts, lengths, strict=True))
    padded_pairs = sum(group.query_index.numel() * group.num_kv_positions for group in batch.groups)
    assert padded_pairs <= 8 * pairs + 2**16
    # Each token stands in one group once, and launches do not explode.
    taken = torch.cat([group.query_index.view(-1)[group.output_index] for group in batch.groups])
    assert taken.sort().values.tolist() == list(range(sum(lengths)))
    assert len(batch.groups) <= 24


def test_bytes_gathered_for_a_group_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = batch_module._CPU_LIMITS.gathered
    gathered: list[tuple[int, int]] = []
    gather = KVPool.gather

    def counted(pool: KVPool, layer: int, first_rows: Tensor, batch: int) -> tuple[Tensor, Tensor]:
        keys, values = gather(pool, layer, first_rows, batch)
        gathered.append((batch, 2 * (keys.numel() + values.numel())))
        return keys, values

    monkeypatch.setattr(KVPool, "gather", counted)
    contexts = [*[4096] * 20, 3 * limit // 1024]
    batch = bare_batch(contexts, [1] * 21, SHAPE)
    one = torch.zeros(21, 4, 64, dtype=torch.bfloat16)
    attend(0, one, one, one, batch, 1.0)
    assert sum(size for size, _ in gathered) == 21
    assert all(size == 1 or num_bytes <= limit for size, num_bytes in gathered)
    assert sum(num_bytes for _, num_bytes in gathered) == 1024 * sum(contexts)


@pytest.mark.parametrize("features", [{}, {"softcap": 2.0}], ids=["mask", "explicit"])
def test_a_prefill_chunk_over_a_long_context_takes_bounded_memory(
    features: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paged, "_MAX_SCORE_BYTES", 1 << 20)
    monkeypatch.setattr(batch_module, "_MAX_KEPT_PAIRS", 1 << 16)
    largest = 0
    softmax, mask = Tensor.softmax, batch_module.AttentionGroup.mask

    def watched(made: Tensor) -> Tensor:
        nonlocal largest
        largest = max(largest, made.numel() * made.element_size())
        return made

    monkeypatch.setattr(Tensor, "softmax", lambda scores, dim: softmax(watched(scores), dim))
    monkeypatch.setattr(batch_module.AttentionGroup, "mask", lambda group, *args: watched(mask(group, *args)))
    contexts, lengths = [4096, 4096, 300], [200, 60, 1]
    batch = bare_batch(contexts, lengths, KVShape(1, 2, 8, 8))
    one = torch.zeros(sum(lengths), 2, 8, dtype=torch.bfloat16)
    attend(0, one.repeat(1, 3, 1), one, one, batch, 1.0, **features)
    assert 1 << 19 < largest <= 1 << 20
    kept = [made for group in batch.groups for made in group._masks.values()]
    assert sum(made.numel() for made in kept) <= 3 << 16
    assert kept  # the decode's


def test_a_layer_with_a_window_gathers_what_the_window_reaches() -> None:
    batch = bare_batch([16384, 16000, 90], [1, 5, 1], SHAPE)
    gathered = sum(len(group.kv(128).first_rows) // 2 * BLOCK_SIZE for group in batch.groups)
    assert gathered <= 3 * (128 + 5 + 2 * BLOCK_SIZE)
    chunk = bare_batch([16384], [512], SHAPE)
    assert len(chunk.groups[0].kv(128).first_rows) // 2 * BLOCK_SIZE <= 512 + 128 + 2 * BLOCK_SIZE
