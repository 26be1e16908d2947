"""The threads that tokenize, shared by all requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

# More would only take turns with each other, and with the event loop, at the interpreter's lock.
_NUM_THREADS = 2


class TokenizerPool:
    """Runs what takes long off the event loop, a few at a time. Who may come, and how many, is for admission to say."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="tokenizer")

    async def run(self, work: Callable[[], T]) -> T:
        """What `work` returns or raises, in its turn.

        Cancelled before its turn, it never runs. A thread cannot be stopped, so one that runs is waited for
        also when cancelled: whoever holds a place for it holds it for as long as the work goes on.
        """
        running = self._executor.submit(work)
        try:
            return await asyncio.wrap_future(running)
        except asyncio.CancelledError:
            if not running.cancelled():
                loop, ended = asyncio.get_running_loop(), asyncio.Event()
                running.add_done_callback(lambda _: loop.call_soon_threadsafe(ended.set))
                await ended.wait()
            raise
