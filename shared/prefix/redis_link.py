"""How the index and its publishers reach Redis: one client, one key layout, one kind of error.

Keys of a model:

- `outrider:{<fingerprint>}:block:<hash, 32 raw bytes>`: a Redis hash, worker instance -> tier
- `outrider:{<fingerprint>}:lease:<worker instance>`: exists while that instance is alive

By the braces all of them hash to one slot, and so do the two prefixes, which is all that a script declares of the
keys it makes at run time: a Redis Cluster takes such a script on the node that has the slot. The index of one model
is thus never spread over nodes. Redirections (MOVED) are not followed: the URL must name that node, or a proxy that
routes; elsewhere every call is refused, and the service goes on without sharing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from shared.prefix.block_hash import HASH_BYTES

_MAX_CONNECTIONS = 8


class RedisUnavailable(Exception):
    """Redis could not be reached, did not answer in time, or refused."""


class RedisLink:
    """Runs Lua scripts over the keys of one model. Bound to the event loop that first uses it."""

    def __init__(self, url: str, fingerprint: str, timeout_seconds: float) -> None:
        """`url` is redis://, rediss:// or unix://, credentials included; nothing is connected yet.

        Raises ValueError for any other URL.
        """
        # `run` limits the whole call, the wait for a connection included, and its callers retry.
        pool = BlockingConnectionPool.from_url(
            url, max_connections=_MAX_CONNECTIONS, timeout=None, retry=Retry(NoBackoff(), 0), protocol=2
        )
        # Set here since the URL's query would win above: with a socket timeout of its own the client
        # (redis 8.1) swallows a cancellation that comes together with the answer.
        pool.connection_kwargs.update(socket_timeout=None, socket_connect_timeout=None)
        self._redis = Redis.from_pool(pool)
        self._timeout_seconds = timeout_seconds
        keys = f"outrider:{{{fingerprint}}}"
        self._block_prefix = f"{keys}:block:"
        self._lease_prefix = f"{keys}:lease:"

    async def run(self, script: str, *args: bytes | str | int) -> Any:
        """Answer of `script`, which sees the two key prefixes as KEYS[1] and KEYS[2], `args` as ARGV.

        Always the text itself (EVAL), not its digest: a digest unknown to a restarted Redis would cost
        a second round trip, and the texts are short. Raises RedisUnavailable.
        """
        try:
            async with asyncio.timeout(self._timeout_seconds):
                return await self._redis.eval(script, 2, self._block_prefix, self._lease_prefix, *args)
        except TimeoutError as error:
            raise RedisUnavailable(f"no answer within {self._timeout_seconds:g} s") from error
        except (RedisError, OSError) as error:
            raise RedisUnavailable(str(error) or type(error).__name__) from error

    async def close(self) -> None:
        """Closes every connection."""
        await self._redis.aclose()


def join_hashes(hashes: Collection[bytes]) -> bytes:
    """The block hashes one after another, as the scripts take them.

    Raises ValueError if they are not of 32 bytes each.
    """
    joined = b"".join(hashes)
    if len(joined) != len(hashes) * HASH_BYTES:
        raise ValueError(f"{len(hashes)} block hashes have {len(joined)} bytes, not {HASH_BYTES} each")
    return joined
