"""A target worker's part in the prefix store: what it computes is kept there, what others computed is fetched."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from shared.engine.block_pool import OutOfBlocks
from shared.engine.kv_export import KVExport
from shared.engine.kv_import import KVImport
from shared.engine.loop import EngineEnded, EngineLoop
from shared.prefix.store import PrefixStore
from shared.transfer.engine import TransferFailed
from shared.transfer.fetch import Fetched, end_import
from shared.transfer.finish import finish

logger = logging.getLogger(__name__)

ENGINE = "redis"

# Of the pool's blocks, the share that may be held at once to be copied: they are no sequence's meanwhile.
_HELD_SHARE = 0.0625
# Blocks that wait to be copied, at most; they are given up if the pool needs their room first.
_MOST_WAITING = 65_536
# How long a copy waits for Redis to take those before it.
_ROOM_SECONDS = 10.0
# Fetches at once, and bytes in one piece of each: in memory beside the pool.
_NUM_FETCHES = 4
_PIECE_BYTES = 64 << 20
# Seconds that a piece may take, and the bytes a second below which it is given up.
_PIECE_SECONDS = 2.0
_LEAST_RATE = 20e6
# How long a worker that ends waits for what it has not written yet, and how often it looks.
_DRAIN_SECONDS = 5.0
_LOOK_SECONDS = 0.05


class StoredPrefixes:
    """Methods named `on_…` run on the engine's thread, which neither copies nor waits: blocks are held as for a peer
    until a thread of their own has copied them."""

    def __init__(self, engine_loop: EngineLoop, store: PrefixStore) -> None:
        """`store`: started; `close` closes it."""
        engine = engine_loop.engine
        self._engine_loop = engine_loop
        self._store = store
        self._pool = engine.pool
        self._exports = engine.scheduler.exports
        self._imports = engine.scheduler.imports
        self._block_size = engine.block_size
        self._most_held = max(1, int(engine.blocks.counts().total * _HELD_SHARE))
        self._waiting: deque[bytes] = deque()
        self._copying: KVExport | None = None
        self._places = asyncio.Semaphore(_NUM_FETCHES)
        self._blocks_a_piece = max(1, _PIECE_BYTES // self._pool.block_num_bytes)
        self._copier = ThreadPoolExecutor(1, thread_name_prefix="prefix-store")

    def counts(self) -> dict[str, int]:
        """Blocks so far, by what became of them; from any thread."""
        store = self._store
        return {
            "stored": store.num_stored,
            "dropped": store.num_dropped,
            "hit": store.num_hits,
            "corrupt": store.num_corrupt,
        }

    def on_stored(self, block_hashes: Sequence[bytes]) -> None:
        """These became findable in the pool."""
        room = _MOST_WAITING - len(self._waiting)
        self._waiting += [each for each in block_hashes if self._store.wants(each)][:room]
        self._copy_next()

    async def fetch(self, kv_import: KVImport) -> Fetched:
        """Brings what `kv_import` lacks and the store has. The import is ended in any case.

        Raises TransferFailed if something is missing and nothing came.
        """
        num_blocks = 0
        ended = False
        missing = kv_import.block_hashes[kv_import.num_held :]
        try:
            async with self._places:
                began = time.monotonic()
                for at in range(0, len(missing), self._blocks_a_piece):
                    piece = missing[at : at + self._blocks_a_piece]
                    limit = _PIECE_SECONDS + len(piece) * self._pool.block_num_bytes / _LEAST_RATE
                    payloads = await self._store.get(piece, limit)
                    last = len(payloads) < len(piece) or at + len(piece) == len(missing)
                    if payloads:
                        await self._take_in(kv_import, payloads, last)
                        ended = last
                    num_blocks += len(payloads)
                    if last:
                        break
        except OutOfBlocks as error:
            raise TransferFailed(f"no room for what comes: {error}") from error
        except EngineEnded as error:
            raise TransferFailed("this worker is ending") from error
        finally:
            if not ended:
                await finish(end_import(self._engine_loop, kv_import))
        if missing and not num_blocks:
            raise TransferFailed("the prefix store has none of its blocks, or does not answer")
        num_bytes = num_blocks * self._pool.block_num_bytes
        return Fetched(kv_import.num_tokens, num_bytes, ENGINE, time.monotonic() - began)

    async def drain(self) -> None:
        """Returns when all is written, or after a few seconds."""
        deadline = time.monotonic() + _DRAIN_SECONDS
        while self._is_busy and time.monotonic() < deadline:  # noqa: ASYNC110 - other threads end it
            await asyncio.sleep(_LOOK_SECONDS)

    async def close(self) -> None:
        """Drops what was not written yet."""
        self._copier.shutdown(wait=False, cancel_futures=True)
        await self._store.close()

    @property
    def _is_busy(self) -> bool:
        return bool(self._waiting or self._copying or self._store.num_pending)

    async def _take_in(self, kv_import: KVImport, payloads: Sequence[bytes], last: bool) -> None:
        """The next blocks; the `last` ones end the import as they are taken in: who waits is in the next step.

        Raises OutOfBlocks.
        """
        blocks = await self._engine_loop.ask(lambda: self._imports.allocate(kv_import, len(payloads)))
        # To its end also when we are cancelled: nothing may be written to the pool later.
        await finish(asyncio.to_thread(self._write, blocks, payloads))
        num_tokens = (kv_import.num_held + len(blocks)) * self._block_size

        def take_in() -> None:
            self._imports.arrived(kv_import, blocks, num_tokens)
            if last:
                self._imports.end(kv_import)

        await self._engine_loop.ask(take_in)

    def _write(self, blocks: Sequence[int], payloads: Sequence[bytes]) -> None:
        for block, payload in zip(blocks, payloads, strict=True):
            self._pool.write_block(block, payload)

    def _copy_next(self) -> None:
        """Holds the next blocks that wait and are still here, and has them copied; one piece at a time."""
        while self._waiting and self._copying is None:
            piece = [self._waiting.popleft() for _ in range(min(self._most_held, len(self._waiting)))]
            export = self._exports.offer_cached(piece)
            # Where the run ends one is not here any more.
            self._waiting.extendleft(reversed(piece[len(export.blocks) + 1 :]))
            if export.blocks:
                self._copying = export
                self._copier.submit(self._copy, export)
            else:
                self._exports.release(export)

    def _copy(self, export: KVExport) -> None:
        """On the copier's thread."""
        try:
            for block_hash, block in zip(export.block_hashes, export.blocks, strict=True):
                if not self._store.wait_for_room(_ROOM_SECONDS):
                    break
                self._store.put(block_hash, self._pool.read_block(block))
        except Exception:
            logger.exception("blocks for the prefix store were not copied")
        finally:
            self._engine_loop.submit(lambda: self._on_copied(export))

    def _on_copied(self, export: KVExport) -> None:
        self._exports.release(export)
        self._copying = None
        self._copy_next()
