"""Attention by Triton's kernels on a CUDA device, against the definition in float64 and PyTorch in float32."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from shared.engine.attention.batch import AttentionBatch
from shared.engine.attention.layer import LayerAttention
from shared.engine.attention.paged import attend
from shared.engine.attention_check import check_attention
from shared.engine.cuda.kernels import TritonKernels, load_triton
from shared.engine.kv_pool import KVPool, KVShape
from tests.support.trees import random_parents
from tests.unit.test_attention import BLOCK_SIZE, FEATURES, SCALE, Case, dense_attention, make_case
from tests.unit.test_cuda_attention import MIXED, WITH_TREES, poison
from tests.unit.test_trees import line_attention

pytestmark = pytest.mark.gpu


def compiled() -> TritonKernels:
    kernels = load_triton()
    assert kernels is not None
    return kernels


def attended(
    case: Case, device: torch.device, features: dict[str, Any], parents: list[tuple[int, ...]] | None = None
) -> Tensor:
    """What its queries see there, in two layers of one step."""
    data = case.pool.data
    pool = KVPool(case.pool.shape, len(data), BLOCK_SIZE, data.dtype, device)
    pool.data.copy_(data)
    batch = AttentionBatch.build(pool, case.starts, case.lengths, case.tables, compiled(), parents)
    there: dict[str, Any] = {
        name: value.to(device) if isinstance(value, Tensor) else value for name, value in features.items()
    }
    query, key, value = (x.to(device) for x in (case.query, *case.newest()))
    first, second = (attend(0, query, key, value, batch, SCALE, **there) for _ in range(2))
    assert torch.equal(first, second)
    return first.double().cpu()


@pytest.mark.parametrize("value_dim", [8, 4])
@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES.keys())
def test_a_ragged_step_attends_as_the_definition_says(
    features: dict[str, Any], value_dim: int, device: torch.device
) -> None:
    case = make_case(MIXED, value_dim)
    poison(case)
    torch.testing.assert_close(
        attended(case, device, features), dense_attention(case, **features), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("features", [*FEATURES.values(), {"sliding_window": 2}], ids=[*FEATURES, "tiny window"])
def test_each_token_of_a_tree_attends_to_its_own_line(features: dict[str, Any], device: torch.device) -> None:
    case, rng = make_case([(context, length) for context, length, _ in WITH_TREES]), random.Random(1)
    poison(case)
    parents = [random_parents(rng, size) for _, _, size in WITH_TREES]
    torch.testing.assert_close(
        attended(case, device, features, parents), line_attention(case, parents, features), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("num_heads", "shape"),
    [
        (1, KVShape(1, 1, 64, 64)),
        (6, KVShape(1, 2, 80, 80)),
        (14, KVShape(1, 2, 128, 128)),
        (32, KVShape(1, 8, 128, 128)),
        (8, KVShape(1, 2, 256, 256)),
        (71, KVShape(1, 1, 64, 64)),
    ],
    ids=str,
)
def test_heads_of_any_size_and_number(num_heads: int, shape: KVShape, dtype: torch.dtype, device: torch.device) -> None:
    how = LayerAttention(num_heads, shape.key_head_dim**-0.5, None, None)
    layers = [how, how._replace(sliding_window=100), how._replace(softcap=30.0)]
    check_attention(compiled(), shape, layers, 16, dtype, 8192, device)
