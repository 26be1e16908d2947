"""Keeps one worker in the list of its deployment for as long as it lives."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from types import TracebackType
from typing import Self

from tenacity import AsyncRetrying, retry_if_exception_type, wait_random_exponential

from shared.redis.link import RedisUnavailable
from shared.redis.outage import Outage
from shared.registry.keys import registry_link
from shared.registry.listing import Listing

logger = logging.getLogger(__name__)

# Always the whole of it, so that whatever Redis lost is there again with the next beat. The dead are cleared away
# here too: a deployment whose workers start again and again may have nobody who reads.
# ARGV: instance id, listing, lease in ms.
_LIST = """
local time = redis.call('TIME')
local now = time[1] * 1000 + time[2] / 1000
redis.call('SET', KEYS[2] .. ARGV[1], ARGV[2], 'PX', ARGV[3])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
redis.call('ZADD', KEYS[1], now + ARGV[3], ARGV[1])
"""
# ARGV: instance id.
_UNLIST = """
redis.call('DEL', KEYS[2] .. ARGV[1])
redis.call('ZREM', KEYS[1], ARGV[1])
"""

# Longest that one script, the connection it may need included, can take, in seconds.
_TIMEOUT_SECONDS = 2.0
# Two may fail before the lease is lost.
_BEATS_PER_LEASE = 3


class Member:
    """One worker's place in the list: put there again three times a lease, so that it ends when the worker does.

    While Redis is away it is tried again and again; a lease that ran out meanwhile, or while this process did
    not run, is taken anew.

    Use as an async context manager, or `start` and `close`.
    """

    def __init__(self, url: str, deployment: str, listing: Listing, lease_seconds: float = 10.0) -> None:
        """Lists `listing` among the workers of `deployment`, in the Redis at `url`.

        Raises ValueError for a URL that is not redis://, rediss:// or unix://, for a name no deployment can
        have, and for a lease of less than 1 ms.
        """
        if lease_seconds < 0.001:
            raise ValueError(f"lease_seconds {lease_seconds:g} is below 0.001")
        self._link = registry_link(url, deployment, _TIMEOUT_SECONDS)
        self._listing = listing
        self._lease_seconds = lease_seconds
        self._outage = Outage(logger, "this worker is listed again when it is back")
        # Held while Redis is told anything.
        self._telling = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def start(self) -> None:
        """Starts on the running event loop; returns before the listing is there. Once only."""
        self._task = asyncio.create_task(self._run(), name="registry-member")
        self._task.add_done_callback(_report_end)

    async def withdraw(self) -> None:
        """Takes the listing out for good; nothing more the second time. Within 4 s.

        If Redis is away the lease ends by itself.
        """
        # A beat under way is awaited: cut off, it might still reach Redis, after the removal.
        async with self._telling:
            task, self._task = self._task, None
            if task is None:
                return
            task.cancel()
            await asyncio.wait({task})
            with contextlib.suppress(RedisUnavailable):
                await self._link.run(_UNLIST, self._listing.instance_id)

    async def close(self) -> None:
        """Takes the listing out, if `withdraw` did not, and disconnects."""
        await self.withdraw()
        await self._link.close()

    async def _run(self) -> None:
        retrying = AsyncRetrying(
            retry=retry_if_exception_type(RedisUnavailable), wait=wait_random_exponential(multiplier=0.05, max=1.0)
        )
        while True:
            await retrying(self._beat)
            await asyncio.sleep(self._lease_seconds / _BEATS_PER_LEASE)

    async def _beat(self) -> None:
        """Raises RedisUnavailable."""
        async with self._telling:
            try:
                await self._link.run(
                    _LIST, self._listing.instance_id, self._listing.encode(), int(self._lease_seconds * 1000)
                )
            except RedisUnavailable as error:
                self._outage.begin(error)
                raise
            self._outage.end()


def _report_end(task: asyncio.Task[None]) -> None:
    """The task only ends by being cancelled; anything else is a bug, and the lease then runs out."""
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("registration stopped: routers lose sight of this worker", exc_info=error)
