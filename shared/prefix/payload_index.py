"""How long a prefix the store of payloads holds: the router's view of it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Sequence
from typing import Any, TypeVar

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from shared.prefix.keys import join_hashes
from shared.redis.link import RedisUnavailable
from shared.redis.outage import Outage

logger = logging.getLogger(__name__)

T = TypeVar("T")

# How many leading blocks are there. ARGV: joined hashes.
_DEPTH = """
local depth = 0
for at = 1, #ARGV[1], 32 do
  if redis.call('EXISTS', KEYS[1] .. string.sub(ARGV[1], at, at + 31)) == 0 then break end
  depth = depth + 1
end
return depth
"""

# About a millisecond of Redis's time, which others wait for. Of more blocks (of 16 tokens: 65536) nobody is told.
_MAX_DEPTH = 4096
# When to give up on an answer that missed the caller's timeout, in seconds: see PrefixIndex.
_LATE_SECONDS = 2.0
_MAX_CONNECTIONS = 8


class PayloadIndex:
    """The store, for those who only ask what is in it. Bound to the event loop that first uses it.

    As in PrefixIndex, an answer that misses the timeout is awaited in the background, and until it comes or
    fails every other lookup answers at once that there is nothing.
    """

    def __init__(self, url: str, fingerprint: str, *, timeout_seconds: float = 0.05) -> None:
        """The store at `url` of the blocks of the model and layout named by `fingerprint`.

        Nothing is connected yet. Raises ValueError for a URL that is not redis://, rediss:// or unix://.
        """
        pool = BlockingConnectionPool.from_url(
            url, max_connections=_MAX_CONNECTIONS, timeout=None, retry=Retry(NoBackoff(), 0), protocol=2
        )
        # As in RedisLink: `within` limits every call, and the URL's query must not say otherwise.
        pool.connection_kwargs.update(socket_timeout=None, socket_connect_timeout=None, decode_responses=False)
        self._redis = Redis.from_pool(pool)
        self._timeout_seconds = timeout_seconds
        self._prefix = f"outrider:{{{fingerprint}}}:payload:".encode()
        self._keys = (self._prefix, f"outrider:{{{fingerprint}}}:payloads".encode())
        self._reading = Outage(logger, "no stored prefixes are found until it is back")
        self._late: set[asyncio.Task[int | None]] = set()

    async def depth(self, hashes: Sequence[bytes]) -> int:
        """How many leading blocks of the chain `hashes` the store has now, 4096 at most. Fetches none of them.

        One round trip. 0 if Redis has no answer within the timeout. Raises ValueError for hashes that are not
        of 32 bytes each.
        """
        joined = join_hashes(hashes[:_MAX_DEPTH])
        if not joined or self._late:
            return 0
        asked = asyncio.create_task(self._ask_depth(joined))
        try:
            await asyncio.wait({asked}, timeout=self._timeout_seconds)
        except asyncio.CancelledError:
            asked.cancel()
            raise
        if not asked.done():
            self._reading.begin(f"no answer within {self._timeout_seconds:g} s")
            self._late.add(asked)
            asked.add_done_callback(self._late.discard)
            return 0
        depth = asked.result()
        if depth is None:
            return 0
        self._reading.end()
        return depth

    async def close(self) -> None:
        """Closes the connections; calls still under way end as they do without Redis."""
        late = tuple(self._late)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
        await self._redis.aclose()

    async def _ask_depth(self, joined: bytes) -> int | None:
        """The lookup itself; None if Redis failed."""
        try:
            depth: int = await within(_LATE_SECONDS, self._run(_DEPTH, joined))
        except RedisUnavailable as error:
            self._reading.begin(error)
            return None
        return depth

    async def _run(self, script: str, *args: bytes | int) -> Any:
        """Answer of `script`, which sees the beginning of the values' keys and the account's key as KEYS."""
        return await self._redis.eval(script, len(self._keys), *self._keys, *args)


async def within(timeout_seconds: float, call: Awaitable[T]) -> T:
    """The result of `call`. Raises RedisUnavailable if Redis fails, or after the timeout."""
    try:
        async with asyncio.timeout(timeout_seconds):
            return await call
    except TimeoutError as error:
        raise RedisUnavailable(f"no answer within {timeout_seconds:g} s") from error
    except (RedisError, OSError) as error:
        # A pipeline's errors first quote the command, raw bytes and all.
        reason = str(error).rpartition(" of pipeline caused error: ")[2]
        raise RedisUnavailable(reason or type(error).__name__) from error
