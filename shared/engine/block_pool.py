"""Which KV blocks are free, cached or owned: reference counts, and reuse by block hash."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class OutOfBlocks(Exception):
    """More blocks were asked for than are free or cached."""


class BlockCounts(NamedTuple):
    """free + cached + owned == total, always."""

    free: int
    cached: int
    owned: int
    total: int


class BlockEvents(NamedTuple):
    """Block hashes that became findable in this pool, and that ceased to be, in order of happening."""

    stored: list[bytes]
    evicted: list[bytes]


class BlockPool:
    """Accounts for `num_blocks` KV blocks, numbered from 0.

    A block is *owned* while its reference count is above 0, *cached* when nobody owns it but its hash can
    still be found, *free* otherwise. Allocation takes free blocks first, then the least recently used
    cached one. Only full blocks of committed tokens are ever given a hash.
    """

    def __init__(self, num_blocks: int) -> None:
        self._ref_counts = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._free = deque(range(num_blocks))
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._events = BlockEvents([], [])

    @property
    def num_allocatable(self) -> int:
        return len(self._free) + len(self._cached)

    def counts(self) -> BlockCounts:
        total, free, cached = len(self._ref_counts), len(self._free), len(self._cached)
        return BlockCounts(free, cached, total - free - cached, total)

    def is_shared(self, block: int) -> bool:
        """Whether a write to this block must copy it first."""
        return self._ref_counts[block] > 1

    def allocate(self, num_blocks: int) -> list[int]:
        """Takes that many blocks, each with one reference. Raises OutOfBlocks, and then takes none."""
        if num_blocks > self.num_allocatable:
            raise OutOfBlocks(f"{num_blocks} blocks asked for, {self.num_allocatable} can be had")
        blocks = []
        for _ in range(num_blocks):
            block = self._free.popleft() if self._free else self._evict()
            self._ref_counts[block] = 1
            blocks.append(block)
        return blocks

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """The blocks that hold the longest leading run of `hashes`; takes no reference."""
        blocks = []
        for block_hash in hashes:
            block = self._block_of.get(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def num_unowned(self, blocks: Iterable[int]) -> int:
        """How many of these `acquire` would take from what can be allocated."""
        return sum(self._ref_counts[block] == 0 for block in blocks)

    def acquire(self, blocks: Iterable[int]) -> None:
        """Adds a reference to each: shared by a fork, or found by `match`."""
        for block in blocks:
            if self._ref_counts[block] == 0:
                del self._cached[block]
            self._ref_counts[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Drops a reference to each, last block first, so that prefixes stay cached longest."""
        for block in reversed(blocks):
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                if self._hashes[block] is None:
                    self._free.append(block)
                else:
                    self._cached[block] = None

    def register(self, block: int, block_hash: bytes) -> None:
        """Makes an owned, full block of committed tokens findable. The first block of a hash keeps it."""
        if block_hash not in self._block_of:
            self._block_of[block_hash] = block
            self._hashes[block] = block_hash
            self._events.stored.append(block_hash)

    def findable(self) -> list[bytes]:
        """Every hash that `match` would find."""
        return list(self._block_of)

    def take_events(self) -> BlockEvents:
        """What became findable or ceased to be since the last call."""
        events, self._events = self._events, BlockEvents([], [])
        return events

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Proves conservation against the block tables of all sequences. Raises AssertionError."""
        owners = [0] * len(self._ref_counts)
        for table in tables:
            for block in table:
                owners[block] += 1
        assert owners == self._ref_counts, "reference counts differ from the block tables"
        unowned = sorted([*self._free, *self._cached])
        assert unowned == [block for block, count in enumerate(owners) if count == 0], "a block is lost or listed twice"
        assert all(self._hashes[block] is not None for block in self._cached), "a cached block has no hash"
        assert all(self._hashes[block] is None for block in self._free), "a free block has a hash"
        named = {key: block for block, key in enumerate(self._hashes) if key is not None}
        assert named == self._block_of, "a hash names another block"

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        block_hash = self._hashes[block]
        assert block_hash is not None
        del self._block_of[block_hash]
        self._hashes[block] = None
        self._events.evicted.append(block_hash)
        return block
