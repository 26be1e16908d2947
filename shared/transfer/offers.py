"""Blocks that this worker holds for others to read: by ticket, under a lease."""

from __future__ import annotations

import asyncio
import secrets
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from shared.engine.kv_export import KVExport
from shared.engine.loop import EngineLoop
from shared.engine.scheduler import Scheduler
from shared.engine.sequence import Sequence as EngineSequence
from shared.rpc.errors import NotFound

# The router tells both ends of a ticket at the same time: the reader may be here before the offer.
_EARLY_SECONDS = 9.0
# Ended tickets that are remembered, to tell one that is over from one that never was.
_NUM_REMEMBERED = 4096


class Ready(NamedTuple):
    """What can be read by now: blocks in the order of the sequence, and the hashes of the full ones.

    `num_tokens`: how many they hold, once nothing more comes.
    """

    blocks: list[int]
    block_hashes: list[bytes]
    num_tokens: int | None


class Offer:
    """The blocks of one ticket, held until the lease is over that whoever reads them renews.

    While they are still being computed and nobody has asked for them, the lease does not run: who computes them
    holds them anyway.
    """

    def __init__(self, lease_seconds: float, give_back: Callable[[], None]) -> None:
        """`give_back` is called once, when the blocks are not held any more."""
        self.fetch_id = secrets.token_bytes(16)
        self.ready = Ready([], [], None)
        self.changed = asyncio.Event()
        self.over = asyncio.Event()  # held no more
        self.taken = False
        self._failed = False
        self._lease_seconds = lease_seconds
        self._give_back: Callable[[], None] | None = give_back
        self._expiry: asyncio.TimerHandle | None = None

    @property
    def held(self) -> bool:
        return self._give_back is not None

    def take(self) -> None:
        """Somebody reads them from now on."""
        self.taken = True
        self.renew()

    def renew(self) -> None:
        """Whoever reads them is alive."""
        if self._expiry is not None:
            self._expiry.cancel()
        self._expiry = asyncio.get_running_loop().call_later(self._lease_seconds, self.end)

    def update(self, ready: Ready, failed: bool) -> None:
        """More is ready, or never will be."""
        self.ready = ready
        if failed:
            self.end()
        elif ready.num_tokens is not None and not self.taken:
            self.renew()
        self.changed.set()

    def end(self) -> None:
        """The blocks are not held any more: read, refused, expired, or never computed. Safe to call again."""
        give_back, self._give_back = self._give_back, None
        if self._expiry is not None:
            self._expiry.cancel()
        if give_back is not None:
            give_back()
        self.over.set()
        self.changed.set()


class Offers:
    """Every offer of a worker. Belongs to the event loop; what it asks of the scheduler runs on the engine's thread."""

    def __init__(self, engine_loop: EngineLoop, lease_seconds: float) -> None:
        self.lease_seconds = lease_seconds
        self._engine_loop = engine_loop
        self._asyncio_loop = asyncio.get_running_loop()
        self._offers: dict[bytes, Offer] = {}
        self._being_read: dict[bytes, Offer] = {}
        self._over: OrderedDict[bytes, None] = OrderedDict()
        self._held: set[Offer] = set()
        self._nothing_held = asyncio.Event()
        self._nothing_held.set()
        # Tickets asked for before they were offered.
        self._early: dict[bytes, asyncio.Event] = {}

    def offer(self, ticket: bytes, sequence: EngineSequence) -> None:
        """Offers a sequence's blocks; on the engine's thread. A ticket offered before is ignored."""
        export = self._scheduler.exports.offer(sequence, lambda: self._tell(offer, export))
        offer = self._new(export, lambda: self._forget(ticket, offer))
        self._asyncio_loop.call_soon_threadsafe(self._add, ticket, offer)
        self._tell(offer, export)

    async def cached(self, block_hashes: Sequence[bytes]) -> Offer:
        """An offer of the leading run of these blocks that is in the cache, which is taken at once."""
        exports: list[KVExport] = []
        try:
            await self._engine_loop.ask(lambda: exports.append(self._scheduler.exports.offer_cached(block_hashes)))
        except asyncio.CancelledError:
            # It is done all the same, and then undone.
            self._engine_loop.submit(lambda: self._release_all(exports))
            raise
        [export] = exports
        offer = self._new(export)
        self._hold(offer)
        offer.update(_snapshot(export), failed=False)
        return self._begin_reading(offer)

    async def take(self, ticket: bytes) -> Offer:
        """The offer of this ticket, which is good for this once.

        Raises NotFound if it is unknown, or was taken or over before.
        """
        if ticket not in self._offers and ticket not in self._over:
            await self._wait_for(ticket)
        if ticket in self._over:
            raise NotFound(f"ticket {ticket.hex()} was taken before, or its lease of {self.lease_seconds:g} s is over")
        offer = self._offers[ticket]
        self._forget(ticket, offer)
        return self._begin_reading(offer)

    def being_read(self, fetch_id: bytes) -> Offer:
        """The offer that this fetch holds. Raises NotFound if it holds none any more."""
        offer = self._being_read.get(fetch_id)
        if offer is None or not offer.held:
            raise NotFound(f"fetch {fetch_id.hex()} holds no blocks here, or its lease is over")
        return offer

    def end_reading(self, offer: Offer) -> None:
        """The fetch is over."""
        self._being_read.pop(offer.fetch_id, None)
        offer.end()

    def drop(self, ticket: bytes) -> None:
        """Nobody will take it; from any thread. One that is being read is left to its reader."""
        self._asyncio_loop.call_soon_threadsafe(self._drop, ticket)

    async def until_nothing_is_held(self) -> None:
        """Returns when every offer was read, or its lease is over."""
        await self._nothing_held.wait()

    @property
    def _scheduler(self) -> Scheduler:
        return self._engine_loop.engine.scheduler

    def _begin_reading(self, offer: Offer) -> Offer:
        self._being_read[offer.fetch_id] = offer
        offer.take()
        return offer

    def _hold(self, offer: Offer) -> None:
        self._held.add(offer)
        self._nothing_held.clear()

    def _new(self, export: KVExport, on_end: Callable[[], None] = lambda: None) -> Offer:
        def give_back() -> None:
            on_end()
            self._held.discard(offer)
            if not self._held:
                self._nothing_held.set()
            self._engine_loop.submit(lambda: self._scheduler.exports.release(export))

        # Named, for `give_back` speaks of it.
        offer = Offer(self.lease_seconds, give_back)
        return offer

    def _release_all(self, exports: Sequence[KVExport]) -> None:
        for export in exports:
            self._scheduler.exports.release(export)

    def _tell(self, offer: Offer, export: KVExport) -> None:
        self._asyncio_loop.call_soon_threadsafe(offer.update, _snapshot(export), export.failed)

    def _add(self, ticket: bytes, offer: Offer) -> None:
        self._hold(offer)
        if ticket in self._offers or ticket in self._over:
            offer.end()
            return
        self._offers[ticket] = offer
        self._wake(ticket)

    def _drop(self, ticket: bytes) -> None:
        offer = self._offers.get(ticket)
        if offer is not None:
            offer.end()

    def _forget(self, ticket: bytes, offer: Offer) -> None:
        """The ticket is over: taken, or nothing is held for it any more."""
        if self._offers.get(ticket) is not offer:
            return
        del self._offers[ticket]
        self._over[ticket] = None
        if len(self._over) > _NUM_REMEMBERED:
            self._over.popitem(last=False)
        self._wake(ticket)

    async def _wait_for(self, ticket: bytes) -> None:
        offered = self._early.setdefault(ticket, asyncio.Event())
        try:
            async with asyncio.timeout(_EARLY_SECONDS):
                await offered.wait()
        except TimeoutError:
            raise NotFound(f"nothing is offered under ticket {ticket.hex()}") from None
        finally:
            self._early.pop(ticket, None)

    def _wake(self, ticket: bytes) -> None:
        if ticket in self._early:
            self._early[ticket].set()


def _snapshot(export: KVExport) -> Ready:
    return Ready(list(export.blocks), list(export.block_hashes), export.num_tokens)
