"""`grpc.health.v1`, served so that no watcher can hold up a change of status."""

from __future__ import annotations

import asyncio
from typing import Any, Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]

LIVE: Final = "live"
"""Served in the name of no service, and always: who gets no answer knows that the process hangs, or is gone."""


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """The status of every service of a server, from NOT_SERVING on.

    In place of grpcio's own: that one writes to a watcher while it holds the lock that a change of status needs,
    so that one watcher who reads nothing stops health, and with it the drain.
    """

    def __init__(self) -> None:
        self._statuses: dict[str, int] = {LIVE: health_pb2.HealthCheckResponse.SERVING}
        # Replaced at every change; watchers wait for it outside of any lock.
        self._changed = asyncio.Event()

    def set(self, services: tuple[str, ...], *, serving: bool) -> None:
        """What is said of `services` from now on."""
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        self._statuses.update(dict.fromkeys(services, status))
        self._changed.set()
        self._changed = asyncio.Event()

    async def Check(self, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        status = self._statuses.get(request.service)
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "unknown service")
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(self, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        told = None
        while True:
            changed = self._changed
            status = self._statuses.get(request.service, health_pb2.HealthCheckResponse.SERVICE_UNKNOWN)
            if status != told:
                await context.write(health_pb2.HealthCheckResponse(status=status))
                told = status
            await changed.wait()
