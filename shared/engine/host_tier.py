"""Evicted KV blocks kept in host memory: which of them, in which slots, and which goes first."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence


class BlockMover(ABC):
    """Copies whole blocks between a worker's KV pool and slots of host memory.

    Copies take place in the order in which they are asked for, and before whatever the engine's thread does with
    these blocks next. Only others, who go past that order, must wait for `settle`.
    """

    @abstractmethod
    def save(self, block: int, slot: int) -> None:
        """Copies a block into a slot."""

    @abstractmethod
    def load(self, slot: int, block: int) -> None:
        """Copies a slot into a block."""

    @abstractmethod
    def settle(self) -> None:
        """Returns when every copy is done."""


class HostTier:
    """Accounts for `num_slots` blocks of host memory: copies of blocks that were evicted, found by their hashes.

    A hash may be in the pool as well: its block came back, or was computed anew. The copy of one that came back is
    kept for the time when it is evicted again, but is the first to go when room is needed; of the others, the one
    saved longest ago.
    """

    def __init__(self, num_slots: int, mover: BlockMover) -> None:
        self.num_slots = num_slots
        self.num_loaded = 0
        self._mover = mover
        self._free = list(range(num_slots))
        self._slots: OrderedDict[bytes, int] = OrderedDict()  # the first to go first
        self._held: frozenset[bytes] = frozenset()

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._slots

    def __len__(self) -> int:
        return len(self._slots)

    def hashes(self) -> list[bytes]:
        """Every hash that is here."""
        return list(self._slots)

    def save(self, block_hash: bytes, block: int) -> bytes | None:
        """Keeps a copy of a block, as the last to go. Returns the hash that is not here any more for it, if any: its
        own where there is no slot to be had."""
        if block_hash in self._slots:
            self._slots.move_to_end(block_hash)
            return None
        gone = None
        if self._free:
            slot = self._free.pop()
        else:
            gone = next(iter(self._slots))
            if gone in self._held:
                return block_hash
            slot = self._slots.pop(gone)
        self._mover.save(block, slot)
        self._slots[block_hash] = slot
        return gone

    def hold(self, hashes: Sequence[bytes]) -> None:
        """Nothing is saved in the place of these before `load`."""
        for block_hash in hashes:
            self._slots.move_to_end(block_hash)
        self._held = frozenset(hashes)

    def load(self, hashes: Sequence[bytes], blocks: Sequence[int]) -> None:
        """Copies what is held into blocks. The copies here go first from now on, the last of them before all."""
        for block_hash, block in zip(hashes, blocks, strict=True):
            self._mover.load(self._slots[block_hash], block)
            self._slots.move_to_end(block_hash, last=False)
        self._held = frozenset()
        self.num_loaded += len(blocks)

    def settle(self) -> None:
        """Returns when every copy is done, for all to see."""
        self._mover.settle()

    def check(self) -> None:
        """Proves that slots are conserved, and nothing is held. Raises AssertionError."""
        slots = sorted([*self._free, *self._slots.values()])
        assert slots == list(range(self.num_slots)), "a slot of host memory is lost or listed twice"
        assert not self._held, "copies in host memory are held for nobody"
