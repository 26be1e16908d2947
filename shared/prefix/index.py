"""How long a prefix each worker holds: the router's view of the Redis index."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from shared.prefix.keys import join_hashes, prefix_link
from shared.redis.link import RedisUnavailable
from shared.redis.outage import Outage

logger = logging.getLogger(__name__)

# Depth of each instance, -1 without a lease. ARGV: joined hashes, then the instances. A script and not a
# pipeline: it stops at the first block nobody holds, and answers one number an instance in place of one
# reply a block.
_LOOKUP = """
local depths, positions, instances = {}, {}, {}
for i = 2, #ARGV do
  depths[i - 1] = -1
  if redis.call('EXISTS', KEYS[2] .. ARGV[i]) == 1 then
    depths[i - 1] = 0
    positions[#positions + 1] = i - 1
    instances[#instances + 1] = ARGV[i]
  end
end
for at = 1, #ARGV[1], 32 do
  if #instances == 0 then break end
  local tiers = redis.call('HMGET', KEYS[1] .. string.sub(ARGV[1], at, at + 31), unpack(instances))
  local still_positions, still_instances = {}, {}
  for i, tier in ipairs(tiers) do
    if tier then
      depths[positions[i]] = depths[positions[i]] + 1
      still_positions[#still_positions + 1] = positions[i]
      still_instances[#still_instances + 1] = instances[i]
    end
  end
  positions, instances = still_positions, still_instances
end
return depths
"""

# When to give up on an answer that missed the caller's timeout, in seconds: long enough for a handshake
# over TLS to another zone.
_LATE_SECONDS = 2.0


class PrefixIndex:
    """Looks up which worker instances hold the leading blocks of a prompt.

    Without Redis every lookup answers {} and placement goes on by load alone. An answer that misses the
    timeout is not thrown away but awaited in the background; until it comes, or fails, lookups answer {}
    at once. So a hanging Redis costs one timeout, not one a request, and a slow handshake still ends in
    a connection.
    """

    def __init__(self, url: str, fingerprint: str, *, timeout_seconds: float = 0.05) -> None:
        """The index at `url` of blocks of the model named by `fingerprint`.

        Nothing is connected before the first lookup. Raises ValueError for a URL that is not redis://,
        rediss:// or unix://.
        """
        self._link = prefix_link(url, fingerprint, _LATE_SECONDS)
        self._timeout_seconds = timeout_seconds
        self._outage = Outage(logger, "prefix lookups find nothing until it is back")
        self._late: set[asyncio.Task[dict[str, int] | None]] = set()

    async def lookup(self, hashes: Sequence[bytes], instances: Sequence[str]) -> dict[str, int]:
        """How many leading blocks of the chain `hashes` each live one of `instances` holds.

        One round trip. Instances without a lease are absent. {} if there is nothing to ask, or if Redis
        has no answer within the timeout. Raises ValueError for hashes that are not of 32 bytes each.
        """
        if not hashes or not instances or self._late:
            return {}
        asked = asyncio.create_task(self._ask(join_hashes(hashes), instances))
        try:
            await asyncio.wait({asked}, timeout=self._timeout_seconds)
        except asyncio.CancelledError:
            asked.cancel()
            raise
        if not asked.done():
            self._outage.begin(f"no answer within {self._timeout_seconds:g} s")
            self._late.add(asked)
            asked.add_done_callback(self._late.discard)
            return {}
        depths = asked.result()
        if depths is None:
            return {}
        self._outage.end()
        return depths

    async def close(self) -> None:
        """Closes the connections; lookups still under way end with {}."""
        late = tuple(self._late)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
        await self._link.close()

    async def _ask(self, joined: bytes, instances: Sequence[str]) -> dict[str, int] | None:
        """The lookup itself; None if Redis failed."""
        try:
            depths = await self._link.run(_LOOKUP, joined, *instances)
        except RedisUnavailable as error:
            self._outage.begin(error)
            return None
        return {instance: depth for instance, depth in zip(instances, depths, strict=True) if depth >= 0}
