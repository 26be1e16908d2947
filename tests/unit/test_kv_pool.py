"""Single positions go from place to place in the pool."""

from __future__ import annotations

import random

import pytest
import torch

from shared.engine.kv_pool import KVPool, KVShape


def test_what_is_beside_blocks_is_copied_with_them() -> None:
    pool = KVPool(KVShape(3, 2, 8, 8), 6, 4, torch.float32, torch.device("cpu"))
    pool.add_beside(KVShape(1, 1, 4, 4), torch.bfloat16)
    assert pool.beside is not None
    pool.beside.data.copy_(torch.arange(6).view(6, 1, 1, 1, 1, 1).expand(pool.beside.data.shape))
    pool.copy_blocks([(1, 2), (2, 5)])
    assert [int(block.unique()) for block in pool.beside.data] == [0, 1, 1, 3, 4, 2]


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
