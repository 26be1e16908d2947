"""A KV pool's memory is found before it is first written, beside the steps and not by one of them."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time

from shared.engine.kv_pool import KVPool
from shared.engine.memory import populate

logger = logging.getLogger(__name__)

# So much of it is kept ready ahead of the blocks that were in use.
_AHEAD_BYTES = 128 << 20
# At once; behind each, so many times as long as it took is left to others: taking half of what is kept ready may
# take 0.2 s, and no request should bear it all. A machine that stood still meanwhile is no reason to rest for minutes.
_CHUNK_BYTES = 2 << 20
_REST = 4.0
_LONGEST_REST = 0.1
# Of the thread that does it: it is in nobody's way, but where all cores are busy it gets some time nevertheless.
_NICENESS = 10

_NOT_AHEAD = "memory of the KV cache is not taken ahead: %s"


class CommitAhead:
    """Of a pool in RAM that takes its memory as it comes to be used: the first write to a page waits for the system,
    for some milliseconds where pages are huge and the machine is a virtual one, and a step with it.

    Blocks are first used in their order. A thread that lives as long as there is something to do asks for the pages of
    the next ones, which keeps what is in them. Where the system cannot do that, or has no more memory or no thread,
    pages come as they are written. Belongs to the engine's thread.
    """

    def __init__(self, pool: KVPool) -> None:
        self._pools = [pool] if pool.beside is None else [pool, pool.beside]
        self._num_blocks = pool.num_blocks
        self._block_num_bytes = sum(each.block_num_bytes for each in self._pools)
        self._num_ahead = max(1, _AHEAD_BYTES // self._block_num_bytes)
        # Taken, or being taken.
        self._end = 0
        self._thread: threading.Thread | None = None

    @property
    def num_bytes(self) -> int:
        """What the pool takes in the end."""
        return self._block_num_bytes * self._num_blocks

    def keep(self, num_used: int) -> None:
        """As many blocks, the first of all, were in use by now. Returns at once."""
        if self._end == self._num_blocks or self._end - num_used > self._num_ahead // 2:
            return
        if self._thread is not None and self._thread.is_alive():
            return
        first, self._end = max(self._end, num_used), min(num_used + self._num_ahead, self._num_blocks)
        thread = threading.Thread(target=self._take, args=(first, self._end), name="commit-ahead", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            logger.debug(_NOT_AHEAD, error)
            return
        self._thread = thread

    def join(self) -> None:
        """Returns when what was asked for so far is there."""
        if self._thread is not None:
            self._thread.join()

    def _take(self, first: int, end: int) -> None:
        try:
            if sys.platform.startswith("linux"):  # elsewhere that is no thread's, and might be another process's
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
            num_blocks = max(1, _CHUNK_BYTES // self._block_num_bytes)
            for block in range(first, end, num_blocks):
                began = time.perf_counter()
                for pool in self._pools:
                    size = pool.block_num_bytes
                    populate(pool.data.data_ptr() + block * size, min(num_blocks, end - block) * size)
                time.sleep(min(_REST * (time.perf_counter() - began), _LONGEST_REST))
        except OSError as error:
            logger.debug(_NOT_AHEAD, error)
