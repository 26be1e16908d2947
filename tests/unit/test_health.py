"""Health, with watchers of every kind."""

from __future__ import annotations

import asyncio
from typing import Any

from grpc_health.v1 import health_pb2  # type: ignore[import-untyped]

from shared.rpc.health import Health

SERVING, NOT_SERVING, UNKNOWN = (
    health_pb2.HealthCheckResponse.SERVING,
    health_pb2.HealthCheckResponse.NOT_SERVING,
    health_pb2.HealthCheckResponse.SERVICE_UNKNOWN,
)


class Watcher:
    """What a watcher is told; one that does not read never gets past its first write."""

    def __init__(self, reads: bool) -> None:
        self.told: asyncio.Queue[int] = asyncio.Queue()
        self._reads = reads

    async def write(self, response: Any) -> None:
        self.told.put_nowait(response.status)
        if not self._reads:
            await asyncio.Event().wait()


async def test_a_watcher_that_does_not_read_holds_nobody_up() -> None:
    health = Health()
    health.set(("", "a"), serving=False)
    watchers = [Watcher(reads=False), Watcher(reads=True), Watcher(reads=True)]
    request = health_pb2.HealthCheckRequest(service="a")
    watching = [asyncio.create_task(health.Watch(request, watcher)) for watcher in watchers]  # type: ignore[arg-type]
    async with asyncio.timeout(10):
        for watcher in watchers:
            assert await watcher.told.get() == NOT_SERVING
        health.set(("", "a"), serving=True)
        for watcher in watchers[1:]:
            assert await watcher.told.get() == SERVING
    for task in watching:
        task.cancel()
    await asyncio.gather(*watching, return_exceptions=True)


async def test_a_watcher_is_told_changes_only_and_also_of_what_is_not_there_yet() -> None:
    health = Health()
    watcher = Watcher(reads=True)
    request = health_pb2.HealthCheckRequest(service="later")
    watching = asyncio.create_task(health.Watch(request, watcher))  # type: ignore[arg-type]
    async with asyncio.timeout(10):
        assert await watcher.told.get() == UNKNOWN
        health.set(("other",), serving=True)
        health.set(("later",), serving=True)
        assert await watcher.told.get() == SERVING
        health.set(("later",), serving=True)
        health.set(("later",), serving=False)
        assert await watcher.told.get() == NOT_SERVING
    assert watcher.told.empty()
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
