"""The keys of the registry in Redis, and the deployments that they keep apart.

Keys of a deployment:

- `outrider:{<deployment>}:workers`: a sorted set, instance id -> when its lease ends (Redis's own clock, in Unix ms)
- `outrider:{<deployment>}:worker:<instance id>`: its listing; the lease is this key's time to live

The set is there to find the others by, and they decide: an id in it whose key is gone is a dead one's. By the braces
all of them hash to one slot: a deployment is never spread over the nodes of a Redis Cluster.
"""

from __future__ import annotations

import re

from shared.redis.link import RedisLink

DEFAULT_DEPLOYMENT = "default"

# No braces, or its keys would not hash to one slot.
_DEPLOYMENT = re.compile(r"[a-z0-9._-]{1,64}")


def deployment_name(value: str) -> str:
    """`value` itself, if it can name a deployment: workers that belong together. Raises ValueError if not."""
    if not _DEPLOYMENT.fullmatch(value):
        raise ValueError(f"deployment {value!r:.80} is not 1 to 64 of a-z, 0-9, '-', '.' and '_'")
    return value


def registry_link(url: str, deployment: str, timeout_seconds: float) -> RedisLink:
    """A link whose scripts see the set's key as KEYS[1], and the beginning of the listings' keys as KEYS[2].

    Raises ValueError for a URL that is not redis://, rediss:// or unix://, and for a name no deployment can have.
    """
    keys = f"outrider:{{{deployment_name(deployment)}}}"
    return RedisLink(url, (f"{keys}:workers", f"{keys}:worker:"), timeout_seconds)
