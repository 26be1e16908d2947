"""The `Transfer` service: the end of a fetch that has the blocks."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Final

import grpc
from outrider.v1 import transfer_pb2, transfer_pb2_grpc

from shared.engine.kv_pool import KVPool
from shared.prefix.block_hash import HASH_BYTES
from shared.rpc.errors import FailedPrecondition, InvalidArgument, NotFound, Unavailable
from shared.transfer.engine import TransferEngine
from shared.transfer.layout import check_layout
from shared.transfer.offers import Offer, Offers

Context = grpc.aio.ServicerContext[Any, Any]

# Below the 4 MiB that any peer takes; large enough that the message around it costs nothing.
CHUNK_BYTES: Final = 2 * 1024 * 1024
# Of a sequence: fewer than the protocol's 32 bits can count, whatever is added to them.
_MOST_TOKENS: Final = 1 << 31


class TransferServicer(transfer_pb2_grpc.TransferServicer):
    """Serves what `Offers` holds, once `attach` has brought it.

    However a call ends, what it holds is given back: by the lease if the process that called is there no more.
    """

    def __init__(self) -> None:
        self._offers: Offers | None = None

    def attach(
        self,
        offers: Offers,
        pool: KVPool,
        layout: transfer_pb2.BlockLayout,
        engines: Mapping[str, TransferEngine],
    ) -> None:
        """From now on blocks of `pool`, which mean `layout`, can be read by these engines."""
        self._offers = offers
        self._pool = pool
        self._layout = layout
        self._engines = engines

    # Coroutines that write, not generators: they are cancelled with their RPC wherever they are.
    async def Fetch(  # type: ignore[override]
        self, request_iterator: AsyncIterator[transfer_pb2.FetchRequest], context: Context
    ) -> None:
        offers = self._loaded()
        begin = await _first(request_iterator)
        check_layout(begin.layout, self._layout)
        engine = next((self._engines[name] for name in begin.engines if name in self._engines), None)
        if engine is None:
            raise FailedPrecondition(f"engines here are {', '.join(self._engines)}, not {', '.join(begin.engines)}")
        most_blocks = _MOST_TOKENS // self._layout.block_size
        if begin.first_block > most_blocks:
            raise InvalidArgument("first_block", str(begin.first_block), f"at most {most_blocks}")
        # Where the offer's blocks begin in the sequence, and the first of them that is wanted.
        base, first_block = 0, begin.first_block
        match begin.WhichOneof("wanted"):
            case "ticket":
                offer = await offers.take(begin.ticket)
            case "prefix":
                base, first_block = begin.first_block, 0
                offer = await offers.cached(_hashes(begin.prefix.block_hashes))
            case _:
                raise InvalidArgument("begin", "neither ticket nor prefix", "with one of them")
        accepted = transfer_pb2.FetchAccepted(
            fetch_id=offer.fetch_id,
            engine=engine.name,
            engine_metadata=engine.metadata,
            lease_seconds=offers.lease_seconds,
        )
        answers = _Answers(context)
        tasks: list[asyncio.Task[Any]] = []
        try:
            await answers.write(transfer_pb2.FetchResponse(accepted=accepted))
            reading = asyncio.create_task(_read_on(request_iterator, offer, answers))
            base_tokens = base * self._layout.block_size
            announcing = asyncio.create_task(_announce(offer, first_block, base_tokens, answers))
            tasks += [reading, announcing]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                await announcing
            over = asyncio.create_task(offer.over.wait())
            tasks.append(over)
            # A reader that does not say any more what it wants gets no further than its lease.
            await asyncio.wait([reading, over], return_when=asyncio.FIRST_COMPLETED)
            if not offer.held:
                raise NotFound(f"the lease of {offers.lease_seconds:g} s was over before all was read")
            await reading
            await answers.write(transfer_pb2.FetchResponse(confirmed=transfer_pb2.Confirmed()))
        finally:
            offers.end_reading(offer)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def Read(  # type: ignore[override]
        self, request: transfer_pb2.ReadRequest, context: Context
    ) -> None:
        offer = self._loaded().being_read(request.fetch_id)
        strange = set(request.blocks) - set(offer.ready.blocks)
        if strange:
            raise NotFound(f"block {min(strange)} is none of those that fetch {request.fetch_id.hex()} holds")
        pieces = max(1, CHUNK_BYTES // self._pool.block_num_bytes)
        for at in range(0, len(request.blocks), pieces):
            if not offer.held:
                raise NotFound(f"the lease of fetch {request.fetch_id.hex()} is over")
            # A copy of megabytes: not on the loop, which other streams wait for.
            for chunk in await asyncio.to_thread(self._chunks, request.blocks[at : at + pieces]):
                await context.write(chunk)
            offer.renew()

    def _chunks(self, blocks: Sequence[int]) -> list[transfer_pb2.BlockChunk]:
        content = b"".join(self._pool.read_block(block) for block in blocks)
        # As a rule one, of as many blocks as fit; only a larger block is cut.
        cuts = [content[at : at + CHUNK_BYTES] for at in range(0, len(content), CHUNK_BYTES)]
        return [transfer_pb2.BlockChunk(payload=cut, checksum=zlib.crc32(cut)) for cut in cuts]

    def _loaded(self) -> Offers:
        if self._offers is None:
            raise Unavailable("the model is still being loaded")
        return self._offers


class _Answers:
    """A call's answers, written one at a time."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._lock = asyncio.Lock()

    async def write(self, response: transfer_pb2.FetchResponse) -> None:
        async with self._lock:
            await self._context.write(response)


async def _first(requests: AsyncIterator[transfer_pb2.FetchRequest]) -> transfer_pb2.FetchBegin:
    async for request in requests:
        if request.WhichOneof("request") == "begin":
            return request.begin
        break
    raise InvalidArgument("request", "none", "begin, as the first of a fetch")


async def _read_on(requests: AsyncIterator[transfer_pb2.FetchRequest], offer: Offer, answers: _Answers) -> None:
    """Renews the lease whenever asked to; returns when all was read. Raises Unavailable if the reader leaves before."""
    async for request in requests:
        match request.WhichOneof("request"):
            case "renew":
                if offer.held:
                    offer.renew()
                    await answers.write(transfer_pb2.FetchResponse(renewed=transfer_pb2.Renewed()))
            case "done":
                return
    raise Unavailable("the reader left before it was done")


async def _announce(offer: Offer, first_block: int, base_tokens: int, answers: _Answers) -> None:
    """Tells of blocks as they become ready, and when nothing more comes. Raises NotFound if they are held no more.

    `base_tokens`: those of the sequence that come before the offer's.
    """
    told = first_block
    while True:
        offer.changed.clear()
        if not offer.held:
            raise NotFound("the blocks are not held any more: their lease is over, or they were never computed")
        ready = offer.ready
        if len(ready.blocks) > told:
            await answers.write(
                transfer_pb2.FetchResponse(
                    ready=transfer_pb2.BlocksReady(
                        blocks=ready.blocks[told:], block_hashes=b"".join(ready.block_hashes[told:])
                    )
                )
            )
            told = len(ready.blocks)
        if ready.num_tokens is not None:
            await answers.write(transfer_pb2.FetchResponse(complete=base_tokens + ready.num_tokens))
            return
        await offer.changed.wait()


def _hashes(joined: bytes) -> list[bytes]:
    if len(joined) % HASH_BYTES:
        raise InvalidArgument("prefix.block_hashes", f"{len(joined)} bytes", f"a multiple of {HASH_BYTES}")
    return [joined[at : at + HASH_BYTES] for at in range(0, len(joined), HASH_BYTES)]
