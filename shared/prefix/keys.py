"""The keys of the prefix index in Redis, and the block hashes as its scripts take them.

Keys of a model:

- `outrider:{<fingerprint>}:block:<hash, 32 raw bytes>`: a Redis hash, worker instance -> tier
- `outrider:{<fingerprint>}:lease:<worker instance>`: exists while that instance is alive

By the braces all of them hash to one slot: the index of one model is never spread over the nodes of a Redis Cluster.
"""

from __future__ import annotations

from collections.abc import Collection

from shared.prefix.block_hash import HASH_BYTES
from shared.redis.link import RedisLink


def prefix_link(url: str, fingerprint: str, timeout_seconds: float) -> RedisLink:
    """A link whose scripts see the beginnings of the blocks' and the leases' keys as KEYS[1] and KEYS[2].

    Raises ValueError for a URL that is not redis://, rediss:// or unix://.
    """
    model = f"outrider:{{{fingerprint}}}"
    return RedisLink(url, (f"{model}:block:", f"{model}:lease:"), timeout_seconds)


def join_hashes(hashes: Collection[bytes]) -> bytes:
    """The block hashes one after another, as the scripts take them.

    Raises ValueError if they are not of 32 bytes each.
    """
    joined = b"".join(hashes)
    if len(joined) != len(hashes) * HASH_BYTES:
        raise ValueError(f"{len(hashes)} block hashes have {len(joined)} bytes, not {HASH_BYTES} each")
    return joined
