"""Single positions go from place to place in the pool."""

from __future__ import annotations

import random

import pytest
import torch

from shared.engine.kv_pool import KVPool, KVShape


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_positions_are_read_before_any_is_written(dtype: torch.dtype) -> None:
    pool = KVPool(KVShape(3, 2, 8, 8), 6, 4, dtype, torch.device("cpu"))
    pool.data.copy_(torch.randn(pool.data.shape, generator=torch.Generator().manual_seed(1)))
    dice = random.Random(2)
    places = [(block, offset) for block in range(6) for offset in range(4)]
    for _ in range(50):
        expected = pool.data.clone()
        count = dice.randrange(9)
        # What one goes to others may come from.
        moves = list(zip(dice.choices(places, k=count), dice.sample(places, count), strict=True))
        for (block, offset), (to_block, to_offset) in moves:
            expected[to_block, :, :, to_offset] = pool.data[block, :, :, offset]
        pool.move_positions(moves)
        assert torch.equal(pool.data, expected)
