"""Blocks over gRPC: everywhere there, checked, and slower than a transfer library."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Sequence
from typing import Any

import grpc
from outrider.v1 import transfer_pb2, transfer_pb2_grpc

from shared.engine.kv_pool import KVPool
from shared.transfer.engine import BlockRead, TransferEngine, TransferFailed, TransferPeer
from shared.transfer.finish import finish
from shared.transfer.peer_channels import PeerChannels


class GrpcEngine(TransferEngine):
    """Reads by `Transfer.Read`, on connections of its own: bulk bytes stand in no token's way.

    What is in flight is bounded by HTTP/2's flow control: a peer sends no more than is taken here.
    """

    name = "grpc"

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        self._channels = PeerChannels()

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
        size = self._pool.block_num_bytes
        destinations = iter([read.destination for read in reads])
        blocks = [read.source for read in reads]
        received = bytearray()
        call = stub.Read(transfer_pb2.ReadRequest(fetch_id=fetch_id, blocks=blocks))
        try:
            async for chunk in call:
                if zlib.crc32(chunk.payload) != chunk.checksum:
                    raise TransferFailed("a chunk came with another checksum than its own")
                received += chunk.payload
                whole = [bytes(received[at : at + size]) for at in range(0, len(received) - size + 1, size)]
                del received[: len(whole) * size]
                places = [next(destinations, None) for _ in whole]
                if None in places:
                    raise TransferFailed(f"more came than the {len(reads)} blocks asked for")
                # To its end also when we are cancelled: nothing may be written to the pool later.
                await finish(asyncio.to_thread(self._write, [place for place in places if place is not None], whole))
        except grpc.aio.AioRpcError as error:
            raise TransferFailed(f"{error.code().name}: {error.details()}") from error
        finally:
            call.cancel()
        if received or next(destinations, None) is not None:
            raise TransferFailed(f"less came than the {len(reads)} blocks of {size} bytes asked for")

    def _write(self, blocks: Sequence[int], payloads: Sequence[bytes]) -> None:
        for block, payload in zip(blocks, payloads, strict=True):
            self._pool.write_block(block, payload)
