"""Attention by Triton's kernels, as its interpreter computes it, against the definition in float64."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from shared.engine.attention.batch import AttentionBatch
from shared.engine.attention.layer import LayerAttention
from shared.engine.attention.paged import attend
from shared.engine.attention_check import check_attention
from shared.engine.kv_pool import KVShape
from shared.settings import StartupError
from tests.support.interpreted import interpreted
from tests.support.trees import random_parents
from tests.unit.test_attention import BLOCK_SIZE, FEATURES, SCALE, Case, dense_attention, make_case
from tests.unit.test_trees import line_attention

from shared.engine.cuda import step, work  # isort: skip
from shared.engine.cuda.step import CudaStep  # isort: skip

# (context, new tokens): decodes, verifications and chunks of prompts, one context far longer.
MIXED = [(700, 1), (33, 1), (64, 1), (17, 5), (200, 9), (16, 16), (90, 40), (1, 1)]
# And of these in a tree.
WITH_TREES = [(40, 12, 11), (25, 25, 7), (300, 1, 0), (70, 9, 8), (18, 5, 0), (2, 2, 1), (90, 66, 63), (50, 4, 9)]


def poison(case: Case) -> None:
    """Not-a-numbers wherever nobody has written anything that counts, block 0 included, which is nobody's from now on:
    what is masked out of a table reads as that."""
    case.pool.data[sum(map(len, case.tables))] = torch.nan
    case.pool.data.copy_(case.pool.data.roll(1, 0))
    for table in case.tables:
        table[:] = [block + 1 for block in table]
    for table, key in zip(case.tables, case.keys, strict=True):
        case.pool.data[table[-1], :, :, (len(key) - 1) % BLOCK_SIZE + 1 :] = torch.nan


@pytest.fixture
def many_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "_LEAST_KEYS", 64)


@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES.keys())
def test_a_ragged_step_attends_as_the_definition_says(features: dict[str, Any]) -> None:
    case = make_case(MIXED)
    poison(case)
    batch = AttentionBatch.build(case.pool, case.starts, case.lengths, case.tables, interpreted())
    assert isinstance(batch.own, CudaStep)
    expected = dense_attention(case, **features)
    for _ in range(2):  # another layer uses the same plan
        got = attend(0, case.query, *case.newest(), batch, SCALE, **features)
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)


def test_keys_and_values_may_differ_in_size() -> None:
    case = make_case(MIXED, value_dim=4)
    poison(case)
    batch = AttentionBatch.build(case.pool, case.starts, case.lengths, case.tables, interpreted())
    got = attend(0, case.query, *case.newest(), batch, SCALE)
    torch.testing.assert_close(got.double(), dense_attention(case), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "features", [FEATURES["plain"], FEATURES["all"], {"sliding_window": 2}], ids=["plain", "all", "tiny window"]
)
def test_each_token_of_a_tree_attends_to_its_own_line(features: dict[str, Any], many_parts: None) -> None:
    case, rng = make_case([(context, length) for context, length, _ in WITH_TREES]), random.Random(1)
    poison(case)
    parents = [random_parents(rng, size) for _, _, size in WITH_TREES]
    batch = AttentionBatch.build(case.pool, case.starts, case.lengths, case.tables, interpreted(), parents)
    expected = line_attention(case, parents, features)
    got = attend(0, case.query, *case.newest(), batch, SCALE, **features)
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)


def test_what_is_written_is_what_torch_writes() -> None:
    """Not-a-numbers and infinities become 0, and nothing beside the new tokens' places changes."""
    ours, torchs = make_case([(20, 3), (40, 40)], value_dim=4), make_case([(20, 3), (40, 40)], value_dim=4)
    key, value = ours.newest()
    key[1, 0, 2], key[5, 1, 0], value[0, 1, 3] = torch.nan, torch.inf, -torch.inf
    attend(0, ours.query, key, value, AttentionBatch.build(*ours[:4], interpreted()), SCALE)
    attend(0, torchs.query, key, value, torchs.batch(), SCALE)
    assert torch.equal(ours.pool.data[:, :, 0], torchs.pool.data[:, :, 0])
    assert torch.equal(ours.pool.data[:, :, 1, ..., :4], torchs.pool.data[:, :, 1, ..., :4])


@pytest.mark.parametrize(
    ("num_heads", "shape"),
    [
        (1, KVShape(1, 1, 64, 64)),
        (8, KVShape(1, 1, 64, 64)),
        (6, KVShape(1, 2, 80, 80)),
        pytest.param(5, KVShape(1, 5, 96, 96), marks=pytest.mark.long),
        pytest.param(14, KVShape(1, 2, 128, 128), marks=pytest.mark.long),
        pytest.param(8, KVShape(1, 2, 256, 256), marks=pytest.mark.long),
        pytest.param(71, KVShape(1, 1, 64, 64), marks=pytest.mark.long),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "dtype", [torch.float32, *(pytest.param(each, marks=pytest.mark.long) for each in (torch.float16, torch.bfloat16))]
)
def test_heads_of_any_size_and_number(num_heads: int, shape: KVShape, dtype: torch.dtype) -> None:
    how = LayerAttention(num_heads, shape.key_head_dim**-0.5, None, None)
    check_attention(interpreted(), shape, [how, how._replace(sliding_window=100)], 16, dtype, 300)


def test_half_precision_is_as_near_as_it_may_be() -> None:
    how = LayerAttention(4, 0.125, None, None)
    for dtype in (torch.float16, torch.bfloat16):
        check_attention(interpreted(), KVShape(1, 2, 64, 64), [how], 16, dtype, 150)


def test_each_kernel_that_a_step_may_take_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled before anybody waits: of every number of rows, with trees and without."""
    seen = set()

    def noted(num_rows: int, head_bytes: int, has_trees: bool, generation: int) -> step.Tile:
        seen.add((num_rows, has_trees))
        return step.Tile(64, 4, 2)

    monkeypatch.setattr(step, "tile_of", noted)
    check_attention(interpreted(), KVShape(1, 2, 16, 16), [LayerAttention(8, 0.25, None, None)], 16, torch.float32, 100)
    assert seen == {(num_rows, has_trees) for num_rows in (16, 32, 64) for has_trees in (False, True)}


def test_kernels_that_attend_otherwise_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    look = CudaStep._look
    monkeypatch.setattr(CudaStep, "_look", lambda step, layer, query, *others: look(step, layer, query * 1.05, *others))
    with pytest.raises(StartupError, match="attend otherwise than PyTorch"):
        check_attention(
            interpreted(), KVShape(1, 2, 64, 64), [LayerAttention(4, 0.125, None, None)], 16, torch.float32, 300
        )
