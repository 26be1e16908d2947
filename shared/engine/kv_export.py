"""KV blocks held for another worker to read, however their sequence goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as List
from typing import TYPE_CHECKING

from shared.engine.block_pool import BlockPool

if TYPE_CHECKING:
    from shared.engine.sequence import Sequence


class KVExport:
    """The leading blocks of one sequence, in order; more become ready as it is computed.

    `block_hashes` are those of the full blocks; a last one may be partly filled. `num_tokens` is how many tokens
    they hold in all, once nothing more comes; None before. It is `failed` if its sequence ended before that.
    """

    def __init__(self, on_change: Callable[[], None]) -> None:
        self.blocks: list[int] = []
        self.block_hashes: list[bytes] = []
        self.num_tokens: int | None = None
        self.failed = False
        self._on_change = on_change

    def changed(self) -> None:
        self._on_change()


class Exports:
    """Every export of a worker. Belongs to the engine's thread, as the pool does.

    An export owns its blocks by references of its own: they stay when the sequence ends or is preempted, and a
    sequence that writes on in its last block copies it first.
    """

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self._pool = pool
        self._block_size = block_size
        self._exports: dict[KVExport, None] = {}
        # What is still being computed, and how many tokens of it were known when it was offered.
        self._growing: dict[Sequence, list[tuple[KVExport, int]]] = {}

    def __len__(self) -> int:
        return len(self._exports)

    def tables(self) -> Iterator[List[int]]:
        """The blocks that each export owns."""
        return (export.blocks for export in self._exports)

    def offer(self, sequence: Sequence, on_change: Callable[[], None]) -> KVExport:
        """Holds the sequence's blocks from now on, computed or to be computed, without its last token's KV.

        Whoever imports them computes that one for its logits anyway. `on_change` is called whenever more is ready,
        or it failed; not within this call.
        """
        export = KVExport(on_change)
        self._exports[export] = None
        self._growing.setdefault(sequence, []).append((export, len(sequence.token_ids) - 1))
        self._grow(sequence)
        return export

    def offer_cached(self, block_hashes: List[bytes]) -> KVExport:
        """Holds the longest leading run of these blocks that is in the cache, or comes back into it."""
        export = KVExport(lambda: None)
        export.blocks = self._pool.find(block_hashes)
        self._pool.settle()
        export.block_hashes = list(block_hashes[: len(export.blocks)])
        export.num_tokens = len(export.blocks) * self._block_size
        self._exports[export] = None
        return export

    def computed(self, sequence: Sequence) -> None:
        """More of the sequence's KV is there."""
        if sequence in self._growing:
            for export in self._grow(sequence):
                export.changed()

    def ended(self, sequence: Sequence) -> None:
        """The sequence is over: what was not computed by now never will be."""
        for export, _ in self._growing.pop(sequence, ()):
            export.failed = True
            export.changed()

    def release(self, export: KVExport) -> None:
        """Gives its blocks up. Safe to call again."""
        if export not in self._exports:
            return
        del self._exports[export]
        self._pool.release(export.blocks)
        export.blocks = []
        for sequence, growing in list(self._growing.items()):
            rest = [entry for entry in growing if entry[0] is not export]
            if rest:
                self._growing[sequence] = rest
            else:
                del self._growing[sequence]

    def _grow(self, sequence: Sequence) -> list[KVExport]:
        """Takes what is computed by now; returns the exports that have more than before."""
        grown, unfinished = [], []
        num_full = sequence.num_registered_blocks
        for export, num_wanted in self._growing.pop(sequence):
            before = len(export.blocks)
            new = sequence.block_table[before:num_full]
            self._pool.acquire(new)
            export.blocks += new
            export.block_hashes += sequence.block_hashes[before:num_full]
            if sequence.num_computed_tokens >= num_wanted:
                export.num_tokens = min(sequence.num_computed_tokens, sequence.num_committed)
                partial = sequence.block_table[num_full : -(-export.num_tokens // self._block_size)]
                self._pool.acquire(partial)
                export.blocks += partial
            else:
                unfinished.append((export, num_wanted))
            if new or export.num_tokens is not None:
                grown.append(export)
        if unfinished:
            self._growing[sequence] = unfinished
        return grown
