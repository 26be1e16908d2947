"""Evicted blocks in host memory, a word each: they come back whole, in time, and as long as they are promised."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from shared.engine.block_pool import BlockPool
from shared.engine.host_tier import BlockMover, HostTier
from tests.support.eviction import forget


def name(number: int) -> bytes:
    return number.to_bytes(32, "little")


class Contents(BlockMover):
    """What blocks and slots hold, a word each."""

    def __init__(self) -> None:
        self.blocks: dict[int, object] = {}
        self.slots: dict[int, object] = {}
        self.num_saved = self.num_settled = 0

    def save(self, block: int, slot: int) -> None:
        self.slots[slot] = self.blocks[block]
        self.num_saved += 1

    def load(self, slot: int, block: int) -> None:
        self.blocks[block] = self.slots[slot]

    def settle(self) -> None:
        self.num_settled += 1


def pool_of(num_blocks: int, num_slots: int) -> tuple[BlockPool, HostTier, Contents]:
    contents = Contents()
    tier = HostTier(num_slots, contents)
    return BlockPool(num_blocks, tier), tier, contents


def store(pool: BlockPool, contents: Contents, *numbers: int) -> None:
    """Computes blocks of these names, and gives them up: the first is the least recently used."""
    blocks = pool.allocate(len(numbers))
    for block, number in zip(blocks, numbers, strict=True):
        contents.blocks[block] = name(number)
        pool.register(block, name(number))
    for block in blocks:
        pool.release([block])


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("num_slots", [1, 3, 8, 40])
def test_what_is_found_is_what_was_stored_under_random_use(seed: int, num_slots: int) -> None:
    rng = random.Random(f"{seed} {num_slots}")
    pool, tier, contents = pool_of(6, num_slots)
    tables: list[list[int]] = []
    told: set[bytes] = set()
    num_cut_short = num_mixed = 0
    for _ in range(3000):
        action = rng.random()
        if action < 0.2 and pool.num_allocatable:
            blocks = pool.allocate(rng.randint(1, min(3, pool.num_allocatable)))
            for block in blocks:
                contents.blocks[block] = None
            tables.append(blocks)
        elif action < 0.4 and tables:
            for block in rng.choice(tables):
                if contents.blocks[block] is None:
                    new = name(rng.randrange(12))
                    contents.blocks[block] = new
                    pool.register(block, new)
        elif action < 0.8 and len(tables) > 1:
            pool.release(tables.pop(rng.randrange(len(tables))))
        else:
            first = rng.randrange(12)
            wanted = [name(first + i) for i in range(rng.randint(1, 4))]
            where, before = pool.match(wanted), pool.num_restored
            assert len(where) == [*(key in told for key in wanted), False].index(False)
            found = pool.find(wanted)
            assert [contents.blocks[block] for block in found] == wanted[: len(found)]
            if len(found) < len(where):
                num_cut_short += 1
                assert pool.num_allocatable == 0
            assert pool.num_restored - before == where[: len(found)].count(None)
            num_mixed += None in where[: len(found)] and where[len(found) - 1] is not None
            if found:
                tables.append(found)
        events = pool.take_events()
        assert not set(events.stored) & set(events.evicted)
        assert set(events.evicted) <= told | set(events.stored)
        told = (told - set(events.evicted)) | set(events.stored)
        assert told == set(pool.findable())
        assert len(pool.findable()) == len(told)
        pool.check(tables)
        assert len(tier) == pool.num_host_blocks <= num_slots
    assert min(pool.num_restored, num_cut_short, num_mixed) > 0
    assert pool.num_restored > 20 or num_slots == 1


def test_what_was_saved_longest_ago_goes_first() -> None:
    pool, tier, contents = pool_of(3, 2)
    store(pool, contents, 1, 2, 3)
    assert pool.take_events().stored == [name(1), name(2), name(3)]
    forget(pool)
    assert tier.hashes() == [name(2), name(3)]
    # In host memory, it has not gone.
    assert pool.take_events() == ([], [name(1)])
    assert set(pool.findable()) == {name(2), name(3)}
    assert pool.match([name(2), name(3), name(1)]) == [None, None]
    assert pool.match([name(1), name(2)]) == []


def test_what_came_back_goes_first_and_is_not_copied_again_while_it_is_there() -> None:
    pool, tier, contents = pool_of(3, 4)
    store(pool, contents, 1, 2, 3)
    forget(pool)
    assert contents.num_saved == 3
    blocks = pool.find([name(2), name(3)])
    assert [contents.blocks[block] for block in blocks] == [name(2), name(3)]
    # The end of a prefix before its beginning.
    assert tier.hashes() == [name(3), name(2), name(1)]
    pool.release(blocks)
    forget(pool)
    assert contents.num_saved == 3
    assert tier.hashes() == [name(1), name(3), name(2)]
    pool.take_events()
    pool.release(pool.find([name(1)]))
    store(pool, contents, 4)
    store(pool, contents, 5, 6, 7)  # 4 takes the slot that was free, 1's goes to the next, for 1 itself is evicted, too
    assert name(1) in tier.hashes()
    assert pool.take_events().evicted == []


def test_a_hash_that_is_in_the_pool_has_not_gone_when_its_copy_goes() -> None:
    pool, tier, contents = pool_of(4, 2)
    store(pool, contents, 1, 2)
    forget(pool)
    held = pool.find([name(1)])
    pool.take_events()
    store(pool, contents, 3, 4, 5)
    forget(pool)
    assert name(1) not in tier.hashes()
    assert name(1) in pool.findable()
    assert name(1) not in pool.take_events().evicted
    pool.check([held])


def test_what_comes_back_is_not_pushed_out_by_what_makes_room_for_it() -> None:
    """All slots are those of what comes back: what goes for it is lost, and said to be."""
    pool, tier, contents = pool_of(2, 2)
    store(pool, contents, 1, 2)
    forget(pool)
    store(pool, contents, 3, 4)
    pool.take_events()
    blocks = pool.find([name(1), name(2)])
    assert [contents.blocks[block] for block in blocks] == [name(1), name(2)]
    assert pool.take_events() == ([name(1), name(2)], [name(3), name(4)])
    assert tier.hashes() == [name(2), name(1)]
    pool.check([blocks])


def test_what_makes_room_for_what_comes_back_is_saved_in_the_place_of_others() -> None:
    pool, tier, contents = pool_of(1, 2)
    for number in (1, 2, 3):
        store(pool, contents, number)
    assert tier.hashes() == [name(1), name(2)]
    pool.take_events()
    pool.release(pool.find([name(1)]))
    assert pool.take_events().evicted == [name(2)]
    assert tier.hashes() == [name(1), name(3)]


def test_only_as_much_comes_back_as_there_is_room_for() -> None:
    pool, _, contents = pool_of(3, 8)
    store(pool, contents, 1, 2, 3)
    forget(pool)
    owned = pool.allocate(1)
    found = pool.find([name(1), name(2), name(3)])
    assert [contents.blocks[block] for block in found] == [name(1), name(2)]
    assert pool.num_allocatable == 0
    pool.check([owned, found])


def lose_a_slot(tier: HostTier) -> None:
    tier._free.pop()


def list_a_slot_twice(tier: HostTier) -> None:
    tier._free.append(next(iter(tier._slots.values())))


def share_a_slot(tier: HostTier) -> None:
    first, second = list(tier._slots)[:2]
    tier._slots[first] = tier._slots[second]


@pytest.mark.parametrize("corrupt", [lose_a_slot, list_a_slot_twice, share_a_slot])
def test_check_notices_corruption(corrupt: Callable[[HostTier], None]) -> None:
    pool, tier, contents = pool_of(3, 4)
    store(pool, contents, 1, 2, 3)
    forget(pool)
    pool.check([])
    corrupt(tier)
    with pytest.raises(AssertionError, match="slot"):
        pool.check([])
