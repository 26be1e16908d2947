"""What a worker reads with, and is read from, if both have nixl."""

from __future__ import annotations

from contextlib import suppress
from typing import ClassVar

from shared.engine.kv_pool import KVPool
from shared.transfer.engine import TransferEngine, TransferFailed
from shared.transfer.nixl.peer import NixlPeer
from shared.transfer.nixl.place import Place
from shared.transfer.nixl.thread import NixlThread


class NixlEngine(TransferEngine):
    """Reads with nixl. Peers on the same machine, or in reach of its RDMA or GPU links, can be read from."""

    name: ClassVar[str] = "nixl"

    def __init__(self, pool: KVPool, instance_id: str) -> None:
        """Registers the pool, which is in RAM or on a CUDA device. No two workers may have the same `instance_id`.

        Raises ImportError without nixl, TransferFailed if it does not work here.
        """
        self._thread = NixlThread(pool, instance_id)
        self._block_bytes = pool.block_num_bytes
        # By the metadata of each: that of a restarted one is new.
        self._peers: dict[bytes, NixlPeer] = {}

    @property
    def metadata(self) -> bytes:
        return self._thread.agent.place.to_metadata()

    async def peer(self, address: str, metadata: bytes) -> NixlPeer:
        place = Place.from_metadata(metadata)
        if place.block_bytes != self._block_bytes:
            raise TransferFailed(f"its blocks have {place.block_bytes} bytes, ours {self._block_bytes}")
        for known, peer in list(self._peers.items()):
            if peer.is_unused:
                del self._peers[known]
                peer.forget()
        if metadata not in self._peers:
            self._peers[metadata] = NixlPeer(self._thread, place)
        peer = self._peers[metadata]
        await peer.connect()
        return peer

    async def close(self) -> None:
        self._peers.clear()
        with suppress(TransferFailed):
            await self._thread.close()
