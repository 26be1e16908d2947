"""gRPC channels to other workers: one to each, for as long as it is used now and then."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc

from shared.security.identity import PLAIN, Identity

# A channel that nobody used for so long is closed: workers come and go, and their addresses with them.
_IDLE_SECONDS = 600.0


@dataclass(eq=False)
class _Known:
    channel: grpc.aio.Channel
    num_users: int = 0
    last_used: float = field(default_factory=time.monotonic)


class PeerChannels:
    """Belongs to the event loop."""

    def __init__(self, identity: Identity = PLAIN) -> None:
        self._identity = identity
        # By address, and certificate: with a new one a new channel is made, and the old one is left to its users.
        self._known: dict[tuple[str, int], _Known] = {}

    @asynccontextmanager
    async def to(self, address: str) -> AsyncIterator[grpc.aio.Channel]:
        """The channel to `address` (host:port), which stays open meanwhile."""
        await self._close_idle()
        key = address, self._identity.generation
        if key not in self._known:
            self._known[key] = _Known(self._identity.connect(address, "target"))
        known = self._known[key]
        known.num_users += 1
        try:
            yield known.channel
        finally:
            known.num_users -= 1
            known.last_used = time.monotonic()

    async def close(self) -> None:
        """Closes every channel, and ends the calls on it."""
        known, self._known = self._known, {}
        for each in known.values():
            await each.channel.close()

    async def _close_idle(self) -> None:
        limit = time.monotonic() - _IDLE_SECONDS
        idle = [key for key, each in self._known.items() if not each.num_users and each.last_used < limit]
        for each in [self._known.pop(key) for key in idle]:
            await each.channel.close()
