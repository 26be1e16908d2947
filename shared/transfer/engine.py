"""What moves the bytes of blocks between the KV pools of two workers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, NamedTuple


class TransferFailed(Exception):
    """Blocks could not be read: the peer died, refused, was too slow, or sent what is not a block."""


class BlockRead(NamedTuple):
    """Block `source` of the peer's pool is wanted in block `destination` of our own."""

    source: int
    destination: int


class TransferPeer(ABC):
    """Another worker, to read blocks from."""

    @abstractmethod
    async def read(self, fetch_id: bytes, reads: Sequence[BlockRead]) -> None:
        """Returns when every block is in its place. `fetch_id` names the Fetch that holds them for us.

        Raises TransferFailed; the destinations then hold anything. Once this has ended, however it ended
        (cancelled, too), none of them is written to any more: only then may they be used for something else.
        """


class TransferEngine(ABC):
    """One worker's end: peers can read the blocks of its pool, and it reads theirs into it."""

    name: ClassVar[str]

    @property
    @abstractmethod
    def metadata(self) -> bytes:
        """What a peer's engine must know to read from here."""

    @abstractmethod
    async def peer(self, address: str, metadata: bytes) -> TransferPeer:
        """The worker at `address` (host:port of its gRPC server), whose engine says `metadata` of itself.

        One that was restarted says something else, and is another peer. Raises TransferFailed.
        """

    @abstractmethod
    async def close(self) -> None:
        """Ends what is under way, and lets go of every peer and of the pool."""
