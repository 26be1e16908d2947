"""Blocks over gRPC: everywhere there, checked, and slower than a transfer library."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Sequence
from typing import Any

import grpc
from outrider.v1 import transfer_pb2, transfer_pb2_grpc

from shared.engine.kv_pool import KVPool
from shared.security.identity import PLAIN, Identity
from shared.transfer.engine import BlockRead, TransferEngine, TransferFailed, TransferPeer
from shared.transfer.finish import finish
from shared.transfer.peer_channels import PeerChannels


class GrpcEngine(TransferEngine):
    """Reads by `Transfer.Read`, on connections of its own: bulk bytes stand in no token's way.

    What is in flight is bounded by HTTP/2's flow control: a peer sends no more than is taken here.
    """

    name = "grpc"

    def __init__(self, pool: KVPool, identity: Identity = PLAIN) -> None:
        self._pool = pool
        self._channels = PeerChannels(identity)

    @property
    def metadata(self) -> bytes:
        return b""

    async def peer(self, address: str, metadata: bytes) -> TransferPeer:
        return GrpcPeer(address, self._channels, self._pool)

    async def close(self) -> None:
        await self._channels.close()


class GrpcPeer(TransferPeer):
    """A worker that sends its blocks in chunks."""

    def __init__(self, address: str, channels: PeerChannels, pool: KVPool) -> None:
        self._address = address
        self._channels = channels
        self._pool = pool

    async def read(self, fetch_id: bytes, reads: Sequence[BlockRead]) -> None:
        async with self._channels.to(self._address) as channel:
            await self._read(transfer_pb2_grpc.TransferStub(channel), fetch_id, reads)

    async def _read(self, stub: Any, fetch_id: bytes, reads: Sequence[BlockRead]) -> None:
        incoming = _Incoming(self._pool, [read.destination for read in reads])
        blocks = [read.source for read in reads]
        call = stub.Read(transfer_pb2.ReadRequest(fetch_id=fetch_id, blocks=blocks))
        try:
            async for chunk in call:
                # To its end also when we are cancelled: nothing may be written to the pool later.
                await finish(asyncio.to_thread(incoming.take_in, chunk))
        except grpc.aio.AioRpcError as error:
            raise TransferFailed(f"{error.code().name}: {error.details()}") from error
        finally:
            call.cancel()
        incoming.end()


class _Incoming:
    """Chunks, put together to blocks and written to their places in the pool."""

    def __init__(self, pool: KVPool, destinations: Sequence[int]) -> None:
        self._pool = pool
        self._destinations = destinations
        self._num_written = 0
        # The beginning of the next block.
        self._rest = b""

    def take_in(self, chunk: transfer_pb2.BlockChunk) -> None:
        """Megabytes are gone through: not for the event loop. Raises TransferFailed."""
        payload, size = chunk.payload, self._pool.block_num_bytes
        if zlib.crc32(payload) != chunk.checksum:
            raise TransferFailed("a chunk came with another checksum than its own")
        content = memoryview(self._rest + payload if self._rest else payload)
        num_whole = len(content) // size
        if self._num_written + num_whole > len(self._destinations):
            raise TransferFailed(f"more came than the {len(self._destinations)} blocks asked for")
        for place in range(num_whole):
            block = self._destinations[self._num_written]
            self._pool.write_block(block, content[place * size : (place + 1) * size])
            self._num_written += 1
        self._rest = bytes(content[num_whole * size :])

    def end(self) -> None:
        """Nothing more comes. Raises TransferFailed if it is not all."""
        if self._rest or self._num_written < len(self._destinations):
            raise TransferFailed(
                f"less came than the {len(self._destinations)} blocks of {self._pool.block_num_bytes} bytes asked for"
            )
