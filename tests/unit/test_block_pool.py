"""The block pool against a model that a page of code can hold, and its order of reuse."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from shared.engine.block_pool import BlockPool, OutOfBlocks


def name(number: int) -> bytes:
    return number.to_bytes(32, "little")


def cached(pool: BlockPool, *numbers: int) -> list[int]:
    """Blocks that hold these hashes, given up in this order: the first is the least recently used."""
    blocks = pool.allocate(len(numbers))
    for block, number in zip(blocks, numbers, strict=True):
        pool.register(block, name(number))
    for block in blocks:
        pool.release([block])
    return blocks


@pytest.mark.parametrize("seed", range(4))
def test_blocks_are_conserved_under_random_use(seed: int) -> None:
    rng = random.Random(seed)
    num_blocks = 12
    pool = BlockPool(num_blocks)
    tables: list[list[int]] = []
    findable: dict[bytes, int] = {}
    num_refused = num_evicted = num_duplicates = 0
    for _ in range(4000):
        action = rng.random()
        if action < 0.25:
            wanted = rng.randint(0, 6)
            owned = {block for table in tables for block in table}
            if wanted > num_blocks - len(owned):
                before = pool.counts()
                with pytest.raises(OutOfBlocks, match=f"{wanted} blocks asked for, {num_blocks - len(owned)}"):
                    pool.allocate(wanted)
                assert pool.counts() == before
                num_refused += 1
            else:
                unnamed = set(range(num_blocks)) - owned - set(findable.values())
                new = pool.allocate(wanted)
                assert len(set(new)) == wanted
                assert not owned & set(new)
                assert unnamed <= set(new) or set(new) <= unnamed  # free ones first
                tables.append(new)
        elif action < 0.55 and tables:
            pool.release(tables.pop(rng.randrange(len(tables))))
        elif action < 0.6 and tables:
            shared = list(rng.choice(tables))
            pool.acquire(shared)
            tables.append(shared)
        elif action < 0.85 and tables:
            for block in rng.choice(tables):
                if block not in findable.values():
                    key = name(rng.randrange(20))
                    pool.register(block, key)
                    num_duplicates += key in findable
                    findable.setdefault(key, block)
        else:
            keys = [name(rng.randrange(20)) for _ in range(rng.randint(0, 4))]
            found = pool.match(keys)
            length = next((i for i, key in enumerate(keys) if key not in findable), len(keys))
            assert found == [findable[key] for key in keys[:length]]
            matched = list(dict.fromkeys(block for block in found if block is not None))
            owned = {block for table in tables for block in table}
            assert pool.num_unowned(matched) == sum(block not in owned for block in matched)
            pool.acquire(matched)
            tables.append(matched)
        events = pool.take_events()
        num_evicted += len(events.evicted)
        for key in events.evicted:
            del findable[key]
        pool.check(tables)
        assert dict.fromkeys(pool.findable()) == dict.fromkeys(findable)
        references = [sum(block in table for table in tables) for block in range(num_blocks)]
        assert [pool.is_shared(block) for block in range(num_blocks)] == [count > 1 for count in references]
        free, cached_, owned_, total = pool.counts()
        assert free + cached_ + owned_ == total == num_blocks
        assert owned_ == sum(count > 0 for count in references)
        assert pool.num_allocatable == free + cached_
    assert min(num_refused, num_evicted, num_duplicates) > 50


def test_free_blocks_go_first_then_the_least_recently_used() -> None:
    pool = BlockPool(5)
    a, b, c = cached(pool, 1, 2, 3)
    pool.acquire([a])  # used again: now the most recent
    pool.release([a])
    first = pool.allocate(2)
    assert not {a, b, c} & set(first)
    assert pool.take_events().evicted == []
    assert pool.allocate(2) == [b, c]
    assert pool.take_events().evicted == [name(2), name(3)]
    assert pool.allocate(1) == [a]


def test_a_released_sequence_keeps_its_beginning_longest() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(4)
    for i, block in enumerate(blocks):
        pool.register(block, name(i))
    pool.release(blocks)
    assert [pool.allocate(1)[0] for _ in range(4)] == blocks[::-1]


def test_match_ends_at_the_first_gap_and_takes_nothing() -> None:
    pool = BlockPool(4)
    blocks = cached(pool, 1, 2, 4)
    before = pool.counts()
    assert pool.match([name(1), name(2), name(3), name(4)]) == blocks[:2]
    assert pool.match([name(9), name(1)]) == []
    assert pool.match([]) == []
    assert pool.counts() == before


def test_an_acquired_block_is_not_evicted() -> None:
    pool = BlockPool(3)
    a, *_ = cached(pool, 1, 2, 3)
    pool.acquire([a])
    assert a not in pool.allocate(2)
    with pytest.raises(OutOfBlocks):
        pool.allocate(1)
    assert pool.match([name(1)]) == [a]


def test_a_shared_block_is_freed_by_its_last_owner() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.acquire([block])
    assert pool.is_shared(block)
    pool.release([block])
    assert not pool.is_shared(block)
    assert pool.counts().owned == 1
    pool.release([block])
    assert pool.counts() == (2, 0, 0, 2)


def test_the_first_block_of_a_hash_keeps_it() -> None:
    pool = BlockPool(3)
    a, b = pool.allocate(2)
    pool.register(a, name(1))
    pool.register(b, name(1))
    assert pool.match([name(1)]) == [a]
    assert pool.take_events().stored == [name(1)]
    pool.release([b])
    assert pool.counts() == (2, 0, 1, 3)  # the second is nobody's: free, not cached
    pool.release([a])
    assert pool.counts() == (2, 1, 0, 3)


def test_events_are_told_once_and_in_order() -> None:
    pool = BlockPool(2)
    cached(pool, 1, 2)
    assert pool.take_events() == ([name(1), name(2)], [])
    assert pool.take_events() == ([], [])
    (block,) = pool.allocate(1)
    pool.register(block, name(3))
    assert pool.take_events() == ([name(3)], [name(1)])
    assert sorted(pool.findable()) == [name(2), name(3)]


def lose_a_block(pool: BlockPool) -> None:
    pool._free.pop()


def list_a_block_twice(pool: BlockPool) -> None:
    pool._free.append(pool._free[0])


def forget_a_reference(pool: BlockPool) -> None:
    pool._ref_counts[0] -= 1


def forget_a_hash(pool: BlockPool) -> None:
    pool._hashes[next(iter(pool._cached))] = None


def keep_the_hash_of_a_free_block(pool: BlockPool) -> None:
    pool._hashes[pool._free[0]] = name(9)


def name_the_wrong_block(pool: BlockPool) -> None:
    pool._block_of[name(1)] = 0


def lose_a_name(pool: BlockPool) -> None:
    del pool._block_of[name(1)]


@pytest.mark.parametrize(
    "corrupt",
    [
        lose_a_block,
        list_a_block_twice,
        forget_a_reference,
        forget_a_hash,
        keep_the_hash_of_a_free_block,
        name_the_wrong_block,
        lose_a_name,
    ],
)
def test_check_notices_corruption(corrupt: Callable[[BlockPool], None]) -> None:
    pool = BlockPool(6)
    table = pool.allocate(2)
    cached(pool, 1, 2)
    pool.check([table])
    corrupt(pool)
    with pytest.raises(AssertionError):
        pool.check([table])


def test_check_wants_every_table() -> None:
    pool = BlockPool(4)
    table = pool.allocate(2)
    for tables in ([], [table, table], [table[:1]]):
        with pytest.raises(AssertionError, match="reference counts differ"):
            pool.check(tables)
