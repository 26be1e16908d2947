"""Blocks over gRPC: everywhere there, checked, and slower than a transfer library."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Sequence

import grpc
from outrider.v1 import transfer_pb2, transfer_pb2_grpc

from shared.engine.kv_pool import KVPool
from shared.rpc.channel import connect
from shared.transfer.engine import BlockRead, TransferEngine, TransferFailed, TransferPeer
from shared.transfer.finish import finish


class GrpcEngine(TransferEngine):
    """Reads by `Transfer.Read`, on connections of its own: bulk bytes stand in no token's way.

    What is in flight is bounded by HTTP/2's flow control: a peer sends no more than is taken here.
    """

    name = "grpc"

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        self._peers: dict[str, GrpcPeer] = {}

    @property
    def metadata(self) -> bytes:
        return b""

    async def peer(self, address: str, metadata: bytes) -> TransferPeer:
        if address not in self._peers:
            self._peers[address] = GrpcPeer(connect(address), self._pool)
        return self._peers[address]

    async def close(self) -> None:
        for peer in self._peers.values():
            await peer.close()


class GrpcPeer(TransferPeer):
    """A worker that sends its blocks in chunks."""

    def __init__(self, channel: grpc.aio.Channel, pool: KVPool) -> None:
        self._channel = channel
        self._stub = transfer_pb2_grpc.TransferStub(channel)
        self._pool = pool

    async def read(self, fetch_id: bytes, reads: Sequence[BlockRead]) -> None:
        size = self._pool.block_num_bytes
        destinations = iter([read.destination for read in reads])
        blocks = [read.source for read in reads]
        received = bytearray()
        call = self._stub.Read(transfer_pb2.ReadRequest(fetch_id=fetch_id, blocks=blocks))
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

    async def close(self) -> None:
        await self._channel.close()

    def _write(self, blocks: Sequence[int], payloads: Sequence[bytes]) -> None:
        for block, payload in zip(blocks, payloads, strict=True):
            self._pool.write_block(block, payload)
