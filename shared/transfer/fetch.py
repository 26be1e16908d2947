"""The end of a fetch that needs the blocks: into the pool while the engine goes on, or not at all."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final, NamedTuple

import grpc
from outrider.v1 import transfer_pb2, transfer_pb2_grpc

from shared.engine.block_pool import OutOfBlocks
from shared.engine.kv_import import KVImport
from shared.engine.loop import EngineEnded, EngineLoop
from shared.prefix.block_hash import HASH_BYTES
from shared.security.identity import PLAIN, Identity
from shared.transfer.engine import BlockRead, TransferEngine, TransferFailed, TransferPeer
from shared.transfer.finish import finish
from shared.transfer.grpc import GrpcEngine
from shared.transfer.peer_channels import PeerChannels

logger = logging.getLogger(__name__)

# A peer that says nothing for so long, though asked more often, is given up: computing the rest is better then.
_SILENCE_SECONDS: Final = 5.0
_RENEW_SECONDS: Final = 1.0
# Bytes a second below which a read is given up, beyond what silence is allowed.
_LEAST_RATE: Final = 20e6
# What is announced while a read is under way goes into the next one, up to so many blocks.
_MAX_BLOCKS_A_READ: Final = 1024
_ENDED_EARLY: Final = "the peer ended the fetch before it was over"


class Fetched(NamedTuple):
    """What a fetch brought: tokens that are held now, bytes that came, by which engine, and in how many seconds of
    reading: the wait for what was still being computed does not count."""

    num_tokens: int
    num_bytes: int
    engine: str
    seconds: float


async def end_import(engine_loop: EngineLoop, kv_import: KVImport) -> None:
    """Nothing more comes, and nothing is written any more to the blocks that were on their way."""
    imports = engine_loop.engine.scheduler.imports

    def end() -> None:
        imports.missed(kv_import, kv_import.in_flight)
        imports.end(kv_import)

    with suppress(EngineEnded):  # and the pool with it
        await engine_loop.ask(end)


class Fetcher:
    """Fetches blocks from other workers into this one's pool."""

    def __init__(
        self,
        engine_loop: EngineLoop,
        layout: transfer_pb2.BlockLayout,
        engines: Mapping[str, TransferEngine],
        identity: Identity = PLAIN,
    ) -> None:
        """`engines`: those to read with by name, the best first."""
        self._engine_loop = engine_loop
        self._layout = layout
        self._engines = engines
        self._channels = PeerChannels(identity)

    async def fetch(self, kv_import: KVImport, address: str, ticket: bytes | None) -> Fetched:
        """Brings what `kv_import` lacks from the worker at `address`: what that offers under `ticket`, or has cached.

        Blocks count as here only when the peer has confirmed that it held them all the while: a lease that ran out
        unnoticed may have given them to others. The import is ended in any case, and none of its blocks is written to
        any more. Raises TransferFailed; what is missing is to be computed then.
        """
        ended = False
        try:
            fetch = _Fetch(self._engine_loop, self._layout, self._engines, kv_import)
            async with self._channels.to(address) as channel:
                num_blocks, engine = await fetch.run(transfer_pb2_grpc.TransferStub(channel), address, ticket)
            ended = True
        except grpc.aio.AioRpcError as error:
            raise TransferFailed(f"{error.code().name}: {error.details()}") from error
        except OutOfBlocks as error:
            raise TransferFailed(f"no room for what comes: {error}") from error
        except EngineEnded as error:
            raise TransferFailed("this worker is ending") from error
        finally:
            if not ended:
                await finish(end_import(self._engine_loop, kv_import))
        num_bytes = num_blocks * self._layout.block_bytes
        return Fetched(kv_import.num_tokens, num_bytes, engine, fetch.read_seconds)

    async def close(self) -> None:
        await self._channels.close()


class _Fetch:
    """One fetch: announced blocks are read as they come, several to a read, and taken in together at the end."""

    def __init__(
        self,
        engine_loop: EngineLoop,
        layout: transfer_pb2.BlockLayout,
        engines: Mapping[str, TransferEngine],
        kv_import: KVImport,
    ) -> None:
        self._loop = engine_loop
        self._layout = layout
        self._engines = engines
        self._import = kv_import
        self._imports = engine_loop.engine.scheduler.imports
        self._first_block = kv_import.num_held
        self.read_seconds = 0.0
        # Blocks of the peer's pool, and of ours that they were read into.
        self._announced: list[int] = []
        self._num_full = 0  # of those announced
        self._read: list[int] = []
        self._num_tokens: int | None = None
        self._done = False  # and nothing more is to be said
        self._confirmed = False
        self._changed = asyncio.Event()
        self._silent_seconds = 0.0
        self._writing = asyncio.Lock()

    async def run(self, stub: Any, address: str, ticket: bytes | None) -> tuple[int, str]:
        """Returns how many blocks came, and by which engine; the import is ended then. Raises TransferFailed,
        AioRpcError, OutOfBlocks."""
        call = stub.Fetch()
        tasks: list[asyncio.Task[None]] = []
        try:
            accepted = await self._begin(call, ticket)
            engine, peer = await self._connect(address, accepted)
            whole = asyncio.create_task(self._read_all(call, peer, accepted.fetch_id))
            # These end only by failing.
            tasks += [whole, asyncio.create_task(self._listen(call)), asyncio.create_task(self._renew(call))]
            ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in ended:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            # A read that is cancelled returns when nothing is written to our blocks any more.
            await finish(_gather(tasks))
            call.cancel()
        await self._loop.ask(self._take_in)
        return len(self._read), engine

    def _take_in(self) -> None:
        """Takes in what was read and ends the import, both between the same two steps: who waits is in the next."""
        self._imports.arrived(self._import, self._read, self._num_tokens or 0)
        self._imports.end(self._import)

    async def _begin(self, call: Any, ticket: bytes | None) -> transfer_pb2.FetchAccepted:
        begin = transfer_pb2.FetchBegin(layout=self._layout, engines=list(self._engines), first_block=self._first_block)
        if ticket is not None:
            begin.ticket = ticket
        else:
            begin.prefix.block_hashes = b"".join(self._import.block_hashes[self._first_block :])
        try:
            async with asyncio.timeout(2 * _SILENCE_SECONDS):
                await self._write(call, transfer_pb2.FetchRequest(begin=begin))
                first: Any = await call.read()
        except TimeoutError:
            raise TransferFailed(f"the peer does not answer within {2 * _SILENCE_SECONDS:g} s") from None
        if first is grpc.aio.EOF or first.WhichOneof("response") != "accepted":
            raise TransferFailed("the peer did not say how to read its blocks")
        accepted: transfer_pb2.FetchAccepted = first.accepted
        return accepted

    async def _connect(self, address: str, accepted: transfer_pb2.FetchAccepted) -> tuple[str, TransferPeer]:
        """Whom to read from, and by which engine: gRPC's where the best that both have does not reach, as nixl between
        machines without RDMA. It needs nothing that was agreed on."""
        if accepted.engine not in self._engines:
            raise TransferFailed(f"the peer is read by {accepted.engine!r}, which is none of those offered")
        try:
            return accepted.engine, await self._engines[accepted.engine].peer(address, accepted.engine_metadata)
        except TransferFailed as error:
            if accepted.engine == GrpcEngine.name or GrpcEngine.name not in self._engines:
                raise
            logger.info("KV goes by gRPC", extra={"address": address, "reason": str(error)})
            return GrpcEngine.name, await self._engines[GrpcEngine.name].peer(address, b"")

    async def _listen(self, call: Any) -> None:
        while True:
            response: Any = await call.read()
            if response is grpc.aio.EOF:
                break
            self._silent_seconds = 0.0
            match response.WhichOneof("response"):
                case "ready":
                    self._take_note(response.ready)
                case "complete":
                    self._complete(response.complete)
                case "confirmed":
                    self._confirmed = True
            self._changed.set()
        if not self._confirmed:
            raise TransferFailed(_ENDED_EARLY)
        # What is left is for `_read_all` to see.
        await asyncio.Event().wait()

    async def _renew(self, call: Any) -> None:
        """Says that we are alive, and hears whether the peer is. Counted in ticks: a process that was stopped itself
        must not take that for its peer's silence."""
        while True:
            await asyncio.sleep(_RENEW_SECONDS)
            self._silent_seconds += _RENEW_SECONDS
            if self._silent_seconds > _SILENCE_SECONDS:
                raise TransferFailed(f"the peer said nothing for {_SILENCE_SECONDS:g} s")
            await self._write(call, transfer_pb2.FetchRequest(renew=transfer_pb2.Renew()))

    async def _read_all(self, call: Any, peer: TransferPeer, fetch_id: bytes) -> None:
        while True:
            self._changed.clear()
            sources = self._announced[len(self._read) :][:_MAX_BLOCKS_A_READ]
            if sources:
                await self._read_into(peer, fetch_id, sources)
            elif self._num_tokens is not None:
                break
            else:
                await self._changed.wait()
        await self._write(call, transfer_pb2.FetchRequest(done=transfer_pb2.Done()))
        while not self._confirmed:
            self._changed.clear()
            await self._changed.wait()

    async def _write(self, call: Any, request: transfer_pb2.FetchRequest) -> None:
        """Nothing behind `done`: the peer ends the call upon it, and for a write that this overtakes gRPC would fail a
        call that went well (grpc/grpc#36066)."""
        async with self._writing:
            if self._done:
                return
            self._done = request.HasField("done")
            try:
                await call.write(request)
            except asyncio.InvalidStateError:  # the call is done, and by the peer: with a status of no error
                raise TransferFailed(_ENDED_EARLY) from None

    async def _read_into(self, peer: TransferPeer, fetch_id: bytes, sources: list[int]) -> None:
        blocks = await self._loop.ask(lambda: self._imports.allocate(self._import, len(sources)))
        reads = [BlockRead(source, block) for source, block in zip(sources, blocks, strict=True)]
        limit = _SILENCE_SECONDS + len(reads) * self._layout.block_bytes / _LEAST_RATE
        began = time.monotonic()
        try:
            async with asyncio.timeout(limit):
                await peer.read(fetch_id, reads)
            self.read_seconds += time.monotonic() - began
        except TimeoutError:
            raise TransferFailed(f"{len(reads)} blocks were not read within {limit:.1f} s") from None
        self._read += blocks

    def _take_note(self, ready: transfer_pb2.BlocksReady) -> None:
        """Raises TransferFailed for blocks that are not those of our tokens."""
        at = self._first_block + len(self._announced)
        num_full, rest = divmod(len(ready.block_hashes), HASH_BYTES)
        ours = b"".join(self._import.block_hashes[at : at + num_full])
        # Behind a block that is not full nothing can come.
        too_many = self._num_full < len(self._announced) or not num_full <= len(ready.blocks) <= num_full + 1
        if rest or ready.block_hashes != ours or too_many:
            raise TransferFailed("the peer has other blocks than those of these tokens")
        self._announced += ready.blocks
        self._num_full += num_full

    def _complete(self, num_tokens: int) -> None:
        num_blocks, num_full = self._first_block + len(self._announced), self._first_block + self._num_full
        size = self._layout.block_size
        if len(self._announced) and (-(-num_tokens // size), num_tokens // size) != (num_blocks, num_full):
            raise TransferFailed(f"the peer counts {num_tokens} tokens in {num_blocks} blocks of {size}")
        # With nothing announced we have all there is, or more.
        self._num_tokens = num_tokens if self._announced else self._first_block * size


async def _gather(tasks: list[asyncio.Task[None]]) -> None:
    await asyncio.gather(*tasks, return_exceptions=True)
