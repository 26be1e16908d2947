"""A target worker's part in moving KV: what it holds for others, and what it fetches for sequences to come."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass

from outrider.v1 import target_pb2

from services.target.stored_prefixes import StoredPrefixes
from shared.engine.kv_import import KVImport
from shared.engine.loop import EngineEnded, EngineLoop
from shared.engine.sequence import Sequence
from shared.policy.placement import STORE
from shared.prefix.block_hash import root_hash
from shared.telemetry.attributes import ERROR_TYPE, NUM_TOKENS, TRANSFER_BYTES, TRANSFER_ENGINE, TRANSFER_PEER
from shared.telemetry.metrics import WorkerMetrics
from shared.telemetry.tracing import Telemetry
from shared.transfer.engine import TransferFailed
from shared.transfer.fetch import Fetched, Fetcher, end_import
from shared.transfer.finish import finish
from shared.transfer.offers import Offers
from shared.transfer.turns import Turns
from shared.worker.stream import RouterStream

logger = logging.getLogger(__name__)

Stream = RouterStream[target_pb2.TargetResponse]

# How often a router hears of a worker that fetches for it.
_SIGN_SECONDS = 1.0


@dataclass(eq=False)
class _Incoming:
    """An import on its way for a router: the KV of `token_ids`, hashed from `root_hash` on. `task` belongs to the event
    loop, the rest to the engine's thread."""

    kv_import: KVImport
    token_ids: list[int]
    root_hash: bytes
    task: asyncio.Task[None] | None = None
    cancelled: bool = False

    def cancel(self) -> None:
        """Nobody needs it any more; on the event loop."""
        self.cancelled = True
        if self.task is not None:
            self.task.cancel()


class HandOver:
    """Methods named `on_…` run on the engine's thread."""

    def __init__(
        self,
        engine_loop: EngineLoop,
        offers: Offers,
        fetcher: Fetcher,
        stored: StoredPrefixes | None,
        telemetry: Telemetry,
        metrics: WorkerMetrics,
    ) -> None:
        """`stored`: None without a prefix store."""
        self._engine_loop = engine_loop
        self._offers = offers
        self._fetcher = fetcher
        self._stored = stored
        self._turns = Turns()
        self._telemetry = telemetry
        self._metrics = metrics
        self._asyncio_loop = asyncio.get_running_loop()
        self._pulls: dict[tuple[Stream, int], _Incoming] = {}
        # Until its fetch is over.
        self._under_way: dict[KVImport, _Incoming] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def on_export(self, ticket: bytes, sequence: Sequence) -> None:
        """Offers a sequence's blocks to whoever comes with the ticket."""
        self._offers.offer(ticket, sequence)

    def on_pull(self, stream: Stream, request: target_pb2.Pull) -> None:
        """Begins to fetch; an id that came before over this stream is ignored."""
        key = (stream, request.pull_id)
        if key in self._pulls:
            return
        engine = self._engine_loop.engine
        root = root_hash(engine.fingerprint, request.cache_salt)
        token_ids = list(request.token_ids)
        kv_import = engine.scheduler.begin_import(token_ids, root)
        incoming = self._pulls[key] = self._under_way[kv_import] = _Incoming(kv_import, token_ids, root)
        self._asyncio_loop.call_soon_threadsafe(self._start, stream, request, incoming)

    def on_withdraw(self, ticket: bytes) -> None:
        """Nobody will come with it."""
        self._offers.drop(ticket)

    def on_begin(self, stream: Stream, pull_id: int, sequence: Sequence) -> None:
        """The sequence begins with what the pull brings, if it is known here, and of this very sequence's tokens: with
        any other's KV it would be wrong, and through the prefix cache whoever shares its blocks."""
        incoming = self._pulls.get((stream, pull_id))
        if incoming is None:
            return
        token_ids = sequence.token_ids[: len(incoming.token_ids)]
        if (token_ids, sequence.root_hash) != (incoming.token_ids, incoming.root_hash):
            logger.error("a sequence is to begin with the KV of other tokens", extra={"pull": pull_id})
            return
        sequence.kv_import = incoming.kv_import

    def on_drop(self, stream: Stream, pull_id: int) -> None:
        """No further sequence begins with it. An unknown id is ignored."""
        incoming = self._pulls.pop((stream, pull_id), None)
        if incoming is not None:
            self._engine_loop.engine.scheduler.imports.drop(incoming.kv_import)
            self.on_left(incoming.kv_import)

    def on_left(self, kv_import: KVImport | None) -> None:
        """A sequence that may have waited for it is gone: if none does nor will, it is not fetched any further."""
        incoming = self._under_way.get(kv_import) if kv_import is not None else None
        if incoming is not None and incoming.kv_import.dropped and not incoming.kv_import.num_waiting:
            self._asyncio_loop.call_soon_threadsafe(incoming.cancel)

    def on_stream_end(self, stream: Stream) -> None:
        """Drops all that was fetched for a router that is gone. What it had offered goes by its lease."""
        for _, pull_id in [key for key in self._pulls if key[0] is stream]:
            self.on_drop(stream, pull_id)

    async def drain(self) -> None:
        """Returns when others have what they were to have from here."""
        await self._offers.until_nothing_is_held()

    async def close(self) -> None:
        """Ends every fetch."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._fetcher.close()

    def _forget(self, kv_import: KVImport) -> None:
        del self._under_way[kv_import]

    def _start(self, stream: Stream, request: target_pb2.Pull, incoming: _Incoming) -> None:
        task = incoming.task = asyncio.create_task(self._fetch(stream, request, incoming.kv_import))
        self._tasks.add(task)

        def on_end(_: object) -> None:
            self._tasks.discard(task)
            self._engine_loop.submit(lambda: self._forget(incoming.kv_import))

        task.add_done_callback(on_end)
        if incoming.cancelled:
            task.cancel()

    async def _fetch(self, stream: Stream, request: target_pb2.Pull, kv_import: KVImport) -> None:
        """Fetches, and tells the router what came of it."""
        began_ns = time.time_ns()
        result = target_pb2.PullResult(pull_id=request.pull_id)
        alive = asyncio.create_task(_give_signs_of_life(stream))
        try:
            fetched = await self._bring(kv_import, request)
            result.num_tokens = fetched.num_tokens
            result.num_bytes = fetched.num_bytes
            result.engine = fetched.engine
            result.seconds = fetched.seconds
            self._metrics.transferred(_kind(request), fetched.engine, fetched.num_bytes, fetched.seconds)
        except TransferFailed as error:
            self._metrics.transfer_failed(_kind(request))
            logger.warning("KV not fetched", extra={"address": _source(request), "reason": str(error)})
            result.error = str(error)
        finally:
            alive.cancel()
        stream.send(target_pb2.TargetResponse(pulls=[result]))
        self._telemetry.record_span(
            "kv.transfer",
            request.traceparent,
            began_ns,
            time.time_ns(),
            {
                TRANSFER_PEER: _source(request),
                TRANSFER_ENGINE: result.engine,
                TRANSFER_BYTES: result.num_bytes,
                NUM_TOKENS: result.num_tokens,
                **({ERROR_TYPE: result.error} if result.error else {}),
            },
        )

    async def _bring(self, kv_import: KVImport, request: target_pb2.Pull) -> Fetched:
        """Raises TransferFailed. The import is ended in any case."""
        if request.ticket:
            return await self._fetcher.fetch(kv_import, request.address, request.ticket)
        async with AsyncExitStack() as turn:
            try:
                if request.from_store and self._stored is None:
                    raise TransferFailed("this worker has no prefix store")
                # Of those that lack the same prefix one fetches it, and the others find it here.
                await turn.enter_async_context(self._turns.of(_first_missing(kv_import)))
                imports = self._engine_loop.engine.scheduler.imports
                await self._engine_loop.ask(lambda: imports.look_again(kv_import))
            except EngineEnded as error:
                raise TransferFailed("this worker is ending") from error
            except BaseException:
                await finish(end_import(self._engine_loop, kv_import))
                raise
            if kv_import.num_held == len(kv_import.block_hashes):
                await finish(end_import(self._engine_loop, kv_import))
                return Fetched(kv_import.num_tokens, 0, "", 0.0)
            if request.from_store and self._stored is not None:
                return await self._stored.fetch(kv_import)
            return await self._fetcher.fetch(kv_import, request.address, None)


def _first_missing(kv_import: KVImport) -> bytes:
    """Its hash; empty if all is here."""
    return b"".join(kv_import.block_hashes[kv_import.num_held : kv_import.num_held + 1])


def _kind(request: target_pb2.Pull) -> str:
    """Of what the KV comes from."""
    return "store" if request.from_store else "worker"


def _source(request: target_pb2.Pull) -> str:
    """Where the KV comes from."""
    return STORE if request.from_store else request.address


async def _give_signs_of_life(stream: Stream) -> None:
    """To a router whose sequences may all wait for KV: without them no step is taken that would tell it."""
    while True:
        await asyncio.sleep(_SIGN_SECONDS)
        stream.send_sign_of_life(target_pb2.TargetResponse())
