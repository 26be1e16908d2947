"""Names of prefix blocks: a hash over a full block's tokens and everything before it.

The names are the same in every process and on every machine: SHA-256 over bytes with a fixed layout,
nothing of Python's own `hash()`.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

HASH_BYTES = 32


def root_hash(fingerprint: str, cache_salt: bytes) -> bytes:
    """The extra key that starts every chain: blocks of other models or tenants never share a name.

    `fingerprint` names model, dtype, block size and layout; `cache_salt` the tenant (b"" for none).
    The fingerprint's length goes in too, so that no two pairs run together into the same bytes.
    """
    model = fingerprint.encode()
    return hashlib.sha256(struct.pack("<I", len(model)) + model + cache_salt).digest()


def hash_blocks(token_ids: Sequence[int], block_size: int, root: bytes, parents: Sequence[bytes] = ()) -> list[bytes]:
    """Hashes of the full blocks of `token_ids`, first block first; a partly filled last block has none.

    Block i is SHA-256(hash of block i - 1, or `root`; then its `block_size` ids as little-endian uint32).
    `parents` are the hashes already known of the leading blocks: only blocks behind them are hashed, and
    they are taken over as they are.

    Raises ValueError for a block size below 1, a root of the wrong length, more parents than full blocks,
    or a token id outside uint32.
    """
    if block_size < 1:
        raise ValueError(f"block_size {block_size} is below 1")
    if len(root) != HASH_BYTES:
        raise ValueError(f"root has {len(root)} bytes, not {HASH_BYTES}")
    num_blocks = len(token_ids) // block_size
    if len(parents) > num_blocks:
        raise ValueError(f"parents holds {len(parents)} hashes, but token_ids only {num_blocks} full blocks")
    layout = struct.Struct(f"<{block_size}I")
    hashes = list(parents)
    parent = hashes[-1] if hashes else root
    for index in range(len(hashes), num_blocks):
        block = token_ids[index * block_size : (index + 1) * block_size]
        try:
            content = layout.pack(*block)
        except struct.error as error:
            raise ValueError(f"token_ids: block {index} holds an id outside [0, 2^32): {error}") from None
        parent = hashlib.sha256(parent + content).digest()
        hashes.append(parent)
    return hashes
