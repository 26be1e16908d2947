"""What a block's bytes look like in Redis: a header that says what they are, then the bytes themselves.

Header, little-endian: magic (4 bytes), version (uint32), SHA-256 of the layout's fingerprint, block hash (32 bytes),
length of the payload (uint64), its CRC-32 (uint32). It guards against accidents (another model's bytes under our key,
a half-written or changed value), not against people: whoever may write to the Redis can store any bytes as a block.
"""

from __future__ import annotations

import hashlib
import struct
import zlib

from shared.prefix.block_hash import HASH_BYTES

_HEADER = struct.Struct("<4sI32s32sQI")
_MAGIC = b"ORKV"
_VERSION = 1

HEADER_BYTES = _HEADER.size


class CorruptPayload(Exception):
    """A value is not the wanted block in the wanted layout, whole and unchanged; the message says what is wrong."""


def pack(layout_fingerprint: str, block_hash: bytes, payload: bytes) -> bytes:
    """The value to keep for a block: `HEADER_BYTES` bytes more than `payload`.

    `layout_fingerprint` names whatever must be equal for the bytes to mean the same KV. Raises ValueError for a block
    hash that is not of 32 bytes.
    """
    if len(block_hash) != HASH_BYTES:
        raise ValueError(f"block_hash has {len(block_hash)} bytes, not {HASH_BYTES}")
    header = _HEADER.pack(_MAGIC, _VERSION, _digest(layout_fingerprint), block_hash, len(payload), zlib.crc32(payload))
    return header + payload


def unpack(layout_fingerprint: str, block_hash: bytes, payload_bytes: int, value: bytes) -> bytes:
    """The payload in `value`: just what was packed, `payload_bytes` long, for this layout and block.

    Raises CorruptPayload for everything else.
    """
    if len(value) < HEADER_BYTES:
        raise CorruptPayload(f"{len(value)} bytes are less than a header")
    magic, version, layout, block, length, checksum = _HEADER.unpack_from(value)
    if magic != _MAGIC:
        raise CorruptPayload("it is not a KV block")
    if version != _VERSION:
        raise CorruptPayload(f"it is of version {version}, not {_VERSION}")
    if layout != _digest(layout_fingerprint):
        raise CorruptPayload("it is of another model or layout")
    if block != block_hash:
        raise CorruptPayload("it is another block")
    if length != payload_bytes:
        raise CorruptPayload(f"its header says {length} bytes, not {payload_bytes}")
    payload = value[HEADER_BYTES:]
    if len(payload) != payload_bytes:
        raise CorruptPayload(f"it has {len(payload)} bytes, not {payload_bytes}")
    if zlib.crc32(payload) != checksum:
        raise CorruptPayload("its checksum is wrong")
    return payload


def _digest(layout_fingerprint: str) -> bytes:
    return hashlib.sha256(layout_fingerprint.encode()).digest()
