"""KV blocks on their way into a pool, and those that came: owned by nobody's sequence yet."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from collections.abc import Sequence as List

from shared.engine.block_pool import BlockPool, OutOfBlocks


class KVImport:
    """The leading blocks of a prompt: those found here, then those that came. Sequences that begin with it find them.

    `block_hashes` name all its full blocks, here or not; `num_held` of them are here. `tail` is a partly filled block
    behind all of them, with which `num_tokens` tokens are held. `ended`: nothing more comes, and who waits need not.
    """

    def __init__(self, block_hashes: List[bytes], arrival: int) -> None:
        self.block_hashes = block_hashes
        self.arrival = arrival
        self.held: list[int] = []
        self.tail: int | None = None
        self.num_tokens = 0
        self.ended = False
        # Being written to by a transfer: not to be given to anybody else before that is over.
        self.in_flight: list[int] = []
        self.num_waiting = 0
        self.dropped = False

    @property
    def num_held(self) -> int:
        return len(self.held)


class Imports:
    """Every import of a worker. Belongs to the engine's thread, as the pool does."""

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self._pool = pool
        self._block_size = block_size
        self._imports: dict[KVImport, None] = {}  # oldest first

    def __len__(self) -> int:
        return len(self._imports)

    def tables(self) -> Iterator[List[int]]:
        """The blocks that each import owns."""
        for each in self._imports:
            yield [*each.held, *each.in_flight, *([] if each.tail is None else [each.tail])]

    def begin(self, block_hashes: List[bytes], arrival: int) -> KVImport:
        """An import of these full blocks; the leading run that is here already, or comes back from host memory, is
        held from now on."""
        made = KVImport(block_hashes, arrival)
        made.held = self._pool.find(block_hashes)
        made.num_tokens = len(made.held) * self._block_size
        self._imports[made] = None
        return made

    def allocate(self, kv_import: KVImport, num_blocks: int) -> list[int]:
        """Blocks to write to, `in_flight` until `arrived` or `missed`. Raises OutOfBlocks."""
        if kv_import.ended:
            raise OutOfBlocks("others needed its blocks")
        blocks = self._pool.allocate(num_blocks)
        self._pool.settle()  # what was in them may still be on its way to host memory
        kv_import.in_flight += blocks
        return blocks

    def arrived(self, kv_import: KVImport, blocks: List[int], num_tokens: int) -> None:
        """The next blocks of the sequence have come; with them `num_tokens` tokens are held.

        If the last of them is partly filled, nothing comes behind it.
        """
        self._land(kv_import, blocks)
        if kv_import not in self._imports or kv_import.ended:  # surrendered or dropped meanwhile
            self._pool.release(blocks)
            self._forget_if_over(kv_import)
            return
        num_full = num_tokens // self._block_size - kv_import.num_held
        for block in blocks[:num_full]:
            self._pool.register(block, kv_import.block_hashes[kv_import.num_held])
            kv_import.held.append(block)
        if blocks[num_full:]:
            [kv_import.tail] = blocks[num_full:]
        kv_import.num_tokens = num_tokens

    def missed(self, kv_import: KVImport, blocks: List[int]) -> None:
        """These did not come, and are not written to any more."""
        self._land(kv_import, blocks)
        self._pool.release(blocks)
        self._forget_if_over(kv_import)

    def end(self, kv_import: KVImport) -> None:
        """Nothing more is to come, complete or not: what is missing will be computed."""
        kv_import.ended = True
        self._forget_if_over(kv_import)

    def waits(self, kv_import: KVImport) -> None:
        """A sequence begins with it."""
        kv_import.num_waiting += 1

    def adopted(self, kv_import: KVImport) -> None:
        """A sequence that waited has references of its own by now, or ended."""
        kv_import.num_waiting -= 1
        self._forget_if_over(kv_import)

    def drop(self, kv_import: KVImport) -> None:
        """No further sequence begins with it. Safe to call again."""
        kv_import.dropped = True
        self._forget_if_over(kv_import)

    def surrender(self, arrival: int, spared: Collection[KVImport] = ()) -> bool:
        """Takes the blocks from the youngest import that came after `arrival` and has any; whether there was one.

        Its full blocks stay in the cache for as long as nobody else needs them.
        """
        for each in reversed(self._imports):
            if each.arrival > arrival and each not in spared and (each.held or each.tail is not None):
                self._release(each)
                each.ended = True
                return True
        return False

    def _land(self, kv_import: KVImport, blocks: List[int]) -> None:
        landed = set(blocks)
        kv_import.in_flight = [block for block in kv_import.in_flight if block not in landed]

    def _release(self, kv_import: KVImport) -> None:
        if kv_import.tail is not None:
            self._pool.release([kv_import.tail])
        self._pool.release(kv_import.held)
        kv_import.held, kv_import.tail, kv_import.num_tokens = [], None, 0

    def _forget_if_over(self, kv_import: KVImport) -> None:
        """Once nobody can begin with it any more and nothing is written to it."""
        if kv_import.dropped and not kv_import.num_waiting and not kv_import.in_flight and kv_import in self._imports:
            self._release(kv_import)
            kv_import.ended = True
            del self._imports[kv_import]
