"""Prompts that drive each other out of a pool, and all driven out at once."""

from __future__ import annotations

from shared.engine.block_pool import BlockPool
from tests.support.machine import VOCAB_SIZE


def prompt_of(number: int, length: int) -> list[int]:
    return [(number * 11 + 7 * i) % VOCAB_SIZE for i in range(length)]


def forget(pool: BlockPool) -> None:
    """Drives everything out of the pool that nobody owns."""
    pool.release(pool.allocate(pool.num_allocatable))
