"""How users of Redis reach it: one client, keys of one slot, one kind of error.

A user names keys, or beginnings of keys, that hash to one slot by what they have in braces. They are all that its
scripts declare of the keys they make at run time: a Redis Cluster takes such a script on the node that has the slot.
Redirections (MOVED) are not followed: the URL must name that node, or a proxy that routes; elsewhere every call is
refused, and the service goes on without.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

_MAX_CONNECTIONS = 8


class RedisUnavailable(Exception):
    """Redis could not be reached, did not answer in time, or refused."""


class RedisLink:
    """Runs Lua scripts over keys of one slot. Bound to the event loop that first uses it."""

    def __init__(self, url: str, key_prefixes: Sequence[str], timeout_seconds: float) -> None:
        """`url` is redis://, rediss:// or unix://, credentials included; nothing is connected yet.

        Raises ValueError for any other URL.
        """
        self.key_prefixes = tuple(key_prefixes)
        # `run` limits the whole call, the wait for a connection included, and its callers retry.
        pool = BlockingConnectionPool.from_url(
            url, max_connections=_MAX_CONNECTIONS, timeout=None, retry=Retry(NoBackoff(), 0), protocol=2
        )
        # Set here since the URL's query would win above: with a socket timeout of its own the client
        # (redis 8.1) swallows a cancellation that comes together with the answer. Texts come as bytes.
        pool.connection_kwargs.update(socket_timeout=None, socket_connect_timeout=None, decode_responses=False)
        self._redis = Redis.from_pool(pool)
        self._timeout_seconds = timeout_seconds

    async def run(self, script: str, *args: bytes | str | int) -> Any:
        """Answer of `script`, which sees the key prefixes as KEYS and `args` as ARGV.

        Always the text itself (EVAL), not its digest: a digest unknown to a restarted Redis would cost
        a second round trip, and the texts are short. Raises RedisUnavailable.
        """
        try:
            async with asyncio.timeout(self._timeout_seconds):
                return await self._redis.eval(script, len(self.key_prefixes), *self.key_prefixes, *args)
        except TimeoutError as error:
            raise RedisUnavailable(f"no answer within {self._timeout_seconds:g} s") from error
        except (RedisError, OSError) as error:
            raise RedisUnavailable(str(error) or type(error).__name__) from error

    async def close(self) -> None:
        """Closes every connection."""
        await self._redis.aclose()
