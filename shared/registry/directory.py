"""Which workers a deployment has: the router's view of the list."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from operator import attrgetter

from shared.redis.link import RedisUnavailable
from shared.redis.outage import Outage
from shared.registry.keys import DEFAULT_DEPLOYMENT, registry_link
from shared.registry.listing import MAX_LISTING_BYTES, Listing

logger = logging.getLogger(__name__)

# Ids with the beginning of what is under their keys, those whose lease ends first, after the dead have been cleared
# away; and how many there are. MGET, since to GET a key that holds no text is an error. ARGV: how long a beginning, in
# bytes; how many ids.
_READ = """
local time = redis.call('TIME')
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', time[1] * 1000 + time[2] / 1000)
local found = {}
for _, id in ipairs(redis.call('ZRANGE', KEYS[1], 0, ARGV[2] - 1)) do
  local text = redis.call('MGET', KEYS[2] .. id)[1]
  if text then found[#found + 1] = {string.sub(id, 1, ARGV[1]), string.sub(text, 1, ARGV[1])} end
end
return {found, redis.call('ZCARD', KEYS[1])}
"""

# More than these are not read: memory is bounded, and so is what a router connects to.
_MAX_LISTINGS = 16_384
# When to give up on an answer, in seconds: long enough for a handshake over TLS to another zone.
_TIMEOUT_SECONDS = 2.0


class Directory:
    """Reads the list of a deployment's workers. What is there but no listing is ignored, and said once."""

    def __init__(self, url: str, deployment: str = DEFAULT_DEPLOYMENT) -> None:
        """The workers of `deployment`, by the Redis at `url`. Nothing is connected before the first reading.

        Raises ValueError for a URL that is not redis://, rediss:// or unix://, and for a name no deployment
        can have.
        """
        self._link = registry_link(url, deployment, _TIMEOUT_SECONDS)
        self._outage = Outage(logger, "workers known so far are all there are until it is back")
        # Ids that the last reading found no listing under, and whether there were too many.
        self._ignored: Collection[bytes] = ()
        self._too_many = False

    async def list(self) -> Sequence[Listing] | None:
        """All workers whose lease has not ended, by kind and address; None if Redis did not answer within 2 s.

        One round trip. No two have the same instance id. Of more than 16,384 those whose lease ends first.
        """
        try:
            found, num_listed = await self._link.run(_READ, MAX_LISTING_BYTES + 1, _MAX_LISTINGS)
        except RedisUnavailable as error:
            self._outage.begin(error)
            return None
        self._outage.end()
        too_many = num_listed > _MAX_LISTINGS
        if too_many and not self._too_many:
            logger.warning("%d workers are listed: no more than %d are followed", num_listed, _MAX_LISTINGS)
        self._too_many = too_many
        listings = []
        errors: dict[bytes, ValueError] = {}
        for instance_id, data in found:
            try:
                listings.append(_decode(instance_id, data))
            except ValueError as error:
                errors[instance_id] = error
        if new := [instance_id for instance_id in errors if instance_id not in self._ignored]:
            logger.warning("%d listings ignored, first that of %.80r: %s", len(new), new[0], errors[new[0]])
        self._ignored = errors.keys()
        return sorted(listings, key=attrgetter("kind", "address", "instance_id"))

    async def close(self) -> None:
        """Closes the connections."""
        await self._link.close()


def _decode(instance_id: bytes, data: bytes) -> Listing:
    """Raises ValueError for what is no listing, or another worker's."""
    listing = Listing.decode(data)
    if listing.instance_id.encode() != instance_id:
        raise ValueError(f"it is that of {listing.instance_id}")
    return listing
