"""Which KV blocks are free, cached or owned: reference counts, and reuse by block hash."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from shared.engine.host_tier import HostTier


class OutOfBlocks(Exception):
    """More blocks were asked for than are free or cached."""


class BlockCounts(NamedTuple):
    """free + cached + owned == total, always."""

    free: int
    cached: int
    owned: int
    total: int


class BlockEvents(NamedTuple):
    """Block hashes that can be found since the last time, and that cannot any more; none is both.

    One that came back from host memory is told of as stored once more.
    """

    stored: list[bytes]
    evicted: list[bytes]


class BlockPool:
    """Accounts for `num_blocks` KV blocks, numbered from 0.

    A block is *owned* while its reference count is above 0, *cached* when nobody owns it but its hash can
    still be found, *free* otherwise. Allocation takes free blocks first, then the least recently used
    cached one, which is kept in the host tier from then on, if there is one. Only full blocks of committed
    tokens are ever given a hash.
    """

    def __init__(self, num_blocks: int, host: HostTier | None = None) -> None:
        self._ref_counts = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._free = deque(range(num_blocks))
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._host = host
        self._changes: dict[bytes, bool] = {}  # whether it can be found now
        self.num_used = 0
        """Blocks that were ever in use: the first so many."""

    @property
    def num_allocatable(self) -> int:
        return len(self._free) + len(self._cached)

    def counts(self) -> BlockCounts:
        total, free, cached = len(self._ref_counts), len(self._free), len(self._cached)
        return BlockCounts(free, cached, total - free - cached, total)

    @property
    def num_host_blocks(self) -> int:
        """Blocks in host memory."""
        return 0 if self._host is None else len(self._host)

    @property
    def num_restored(self) -> int:
        """Blocks that came back from host memory, ever."""
        return 0 if self._host is None else self._host.num_loaded

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
            self.num_used = max(self.num_used, block + 1)
            self._ref_counts[block] = 1
            blocks.append(block)
        return blocks

    def match(self, hashes: Sequence[bytes]) -> list[int | None]:
        """The blocks that hold the longest leading run of `hashes`; None for each that is in host memory only.

        Takes no reference.
        """
        blocks = []
        for block_hash in hashes:
            block = self._block_of.get(block_hash)
            if block is None and (self._host is None or block_hash not in self._host):
                break
            blocks.append(block)
        return blocks

    def find(self, hashes: Sequence[bytes]) -> list[int]:
        """The blocks of the longest leading run of `hashes`, each with one more reference.

        What is in host memory only is brought back; the run ends where there is no room for it.
        """
        blocks: list[int | None] = []
        room = self.num_allocatable
        for block in self.match(hashes):
            room -= block is None or self._ref_counts[block] == 0
            if room < 0:
                break
            blocks.append(block)
        self.acquire(block for block in blocks if block is not None)
        missing = [block_hash for block_hash, block in zip(hashes, blocks, strict=False) if block is None]
        restored = iter(self._restore(missing))
        return [next(restored) if block is None else block for block in blocks]

    def settle(self) -> None:
        """Returns when all blocks are as they are accounted for, also for those who do not go by the engine's order:
        who read and write them for other workers."""
        if self._host is not None:
            self._host.settle()

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
                    self._free.appendleft(block)  # its memory is there, and in caches
                else:
                    self._cached[block] = None

    def register(self, block: int, block_hash: bytes) -> None:
        """Makes an owned, full block of committed tokens findable. The first block of a hash keeps it."""
        if block_hash not in self._block_of:
            self._block_of[block_hash] = block
            self._hashes[block] = block_hash
            self._changes[block_hash] = True

    def share(self, block: int, block_hash: bytes) -> int:
        """As `register`, but where another block has this hash already that one takes the place of `block`, with its
        reference. Returns the one that is owned now."""
        other = self._block_of.get(block_hash, block)
        self.register(block, block_hash)
        if other != block:
            self.acquire([other])
            self.release([block])
        return other

    def findable(self) -> list[bytes]:
        """Every hash that `find` would find. From any thread: one that moves meanwhile is here, or among the events."""
        # In this order: a block is in host memory before it leaves the pool.
        here = list(self._block_of)
        return here if self._host is None else list({*here, *self._host.hashes()})

    def take_events(self) -> BlockEvents:
        """What can be found since the last call, and what cannot any more, in order of happening."""
        changes, self._changes = self._changes, {}
        stored = [block_hash for block_hash, held in changes.items() if held]
        return BlockEvents(stored, [block_hash for block_hash, held in changes.items() if not held])

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
        if self._host is not None:
            self._host.check()

    def _restore(self, hashes: Sequence[bytes]) -> list[int]:
        """Blocks that these come back into from host memory, each with one reference."""
        if self._host is None or not hashes:
            return []
        # What goes to host memory to make room for them must not push them out there.
        self._host.hold(hashes)
        blocks = self.allocate(len(hashes))
        self._host.load(hashes, blocks)
        for block, block_hash in zip(blocks, hashes, strict=True):
            self.register(block, block_hash)
        return blocks

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        block_hash = self._hashes[block]
        assert block_hash is not None
        gone = block_hash if self._host is None else self._host.save(block_hash, block)
        del self._block_of[block_hash]
        self._hashes[block] = None
        if gone is not None and gone not in self._block_of:
            self._changes[gone] = False
        return block
