"""Where an engine's blocks lie, as its peers are told."""

from __future__ import annotations

import struct
import zlib
from typing import NamedTuple

from shared.transfer.engine import TransferFailed

_MAGIC = b"KVnixl01"
_CHECKSUM = struct.Struct("<I")
# Kind of memory, device, address of block 0, bytes of a block, number of blocks.
_PLACE = struct.Struct("<BIQQQ")


class Place(NamedTuple):
    """Where an engine's blocks lie, and how nixl reaches them."""

    kind: int
    device: int
    address: int
    block_bytes: int
    num_blocks: int
    # What the engine's nixl agent says of itself.
    agent: bytes

    def to_metadata(self) -> bytes:
        body = _PLACE.pack(*self[:-1]) + self.agent
        return _MAGIC + _CHECKSUM.pack(zlib.crc32(body)) + body

    @classmethod
    def from_metadata(cls, metadata: bytes) -> Place:
        """Raises TransferFailed for what `to_metadata` did not make: nixl itself may crash on it."""
        start = len(_MAGIC) + _CHECKSUM.size
        checksum, body = metadata[len(_MAGIC) : start], metadata[start:]
        if not metadata.startswith(_MAGIC) or len(body) < _PLACE.size:
            raise TransferFailed("not the metadata of a nixl engine")
        if checksum != _CHECKSUM.pack(zlib.crc32(body)):
            raise TransferFailed("damaged metadata of a nixl engine")
        kind, device, address, block_bytes, num_blocks = _PLACE.unpack_from(body)
        return cls(kind, device, address, block_bytes, num_blocks, body[_PLACE.size :])
