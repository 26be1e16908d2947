"""A gRPC server with health, reflection, tracing, error mapping and a drain."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Awaitable, Callable
from typing import TypeVar

import grpc
from grpc_health.v1 import health_pb2_grpc  # type: ignore[import-untyped]
from grpc_health.v1.health import SERVICE_NAME as HEALTH  # type: ignore[import-untyped]
from grpc_reflection.v1alpha import reflection  # type: ignore[import-untyped]

from shared.rpc.edge import Authenticate, CheckCaller, Edge
from shared.rpc.health import Health
from shared.rpc.open_files import HEALTH_SHARE, SERVICE_SHARE, most_connections
from shared.rpc.options import MAX_MESSAGE_BYTES, server_options
from shared.settings import StartupError
from shared.telemetry.tracing import Telemetry

logger = logging.getLogger(__name__)

_Servicer = TypeVar("_Servicer")

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
# Of a request for health: the name of a service.
_HEALTH_REQUEST_BYTES = 64 * 1024
# Seconds that handlers have to release what they hold after their RPCs were cancelled.
_UNWIND_SECONDS = 5.0


class BindError(StartupError):
    """The server cannot listen on its address."""


class RpcServer:
    """One process's gRPC server. Make it inside the event loop, `add` services, `start`, then `serve`.

    Health (`grpc.health.v1`) is NOT_SERVING for "" and for every service until `set_serving(True)`.
    """

    def __init__(
        self,
        address: str,
        telemetry: Telemetry,
        *,
        credentials: grpc.ServerCredentials | None = None,
        health_address: str | None = None,
        authenticate: Authenticate | None = None,
        check_caller: CheckCaller | None = None,
        max_request_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        """`address` is "host:port" or "unix:path"; with port 0 the system chooses one at `start`.

        `credentials`: of TLS; None listens in plain text. `health_address`: where health is to be had as well, alone
        and in plain text, for probes that know no TLS. `authenticate` and `check_caller` raise for a call that is
        not let in, by its metadata and by its connection; of health and reflection they are not asked. A request of
        more than `max_request_bytes` gets RESOURCE_EXHAUSTED from gRPC itself; connections are limited by the open
        files that the process may have.
        """
        self.address = address
        self._credentials = credentials
        self._edge = Edge(telemetry, authenticate, check_caller)
        options = server_options(max_request_bytes, most_connections(SERVICE_SHARE))
        self._server = grpc.aio.server(interceptors=[self._edge], options=options)
        self._health = Health()
        self._health_address = health_address
        self._servers = [self._server]
        self._services: list[str] = []
        self._drained = False

    def add(
        self,
        service: str,
        register: Callable[[_Servicer, grpc.aio.Server], None],
        servicer: _Servicer,
        *,
        while_draining: bool = False,
    ) -> None:
        """Serve `service` (its full name) by `servicer`, with the generated `add_…_to_server` as `register`.

        `while_draining`: new calls are taken then as well.
        """
        register(servicer, self._server)
        self._services.append(service)
        if while_draining:
            self._edge.never_refuse(service)

    async def start(self) -> None:
        """Listen; `address` then tells the port in use.

        Raises:
            BindError: the address is in use, not of this machine, or not an address.
        """
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection([*self._services, HEALTH, reflection.SERVICE_NAME], self._server)
        await self.set_serving(False)
        port = _listen(self._server, self.address, self._credentials)
        if not self.address.startswith("unix:"):
            self.address = f"{self.address.rpartition(':')[0]}:{port}"
        if self._health_address is not None:
            options = server_options(_HEALTH_REQUEST_BYTES, most_connections(HEALTH_SHARE))
            probed = grpc.aio.server(interceptors=[self._edge], options=options)
            health_pb2_grpc.add_HealthServicer_to_server(self._health, probed)
            _listen(probed, self._health_address, None)
            self._servers.append(probed)
        for server in self._servers:
            await server.start()
        logger.info("listening", extra={"address": self.address, "tls": self._credentials is not None})

    async def set_serving(self, serving: bool) -> None:
        """What health says of "" and of every service; without effect once drained."""
        if not self._drained:
            self._health.set(("", *self._services), serving=serving)

    async def serve(self, draining: Callable[[], Awaitable[None]], grace: float) -> None:
        """Serve until SIGTERM or SIGINT, then `drain`. A second signal cuts the drain short.

        However it ends (cancellation included), the server is stopped when this returns.
        """
        loop = asyncio.get_running_loop()
        signals: asyncio.Queue[signal.Signals] = asyncio.Queue()
        for number in _SIGNALS:
            loop.add_signal_handler(number, signals.put_nowait, number)
        try:
            first = await signals.get()
            logger.info("draining", extra={"signal": first.name, "grace_seconds": grace})
            drain = asyncio.create_task(self.drain(draining, grace))
            second = asyncio.create_task(signals.get())
            try:
                await asyncio.wait((drain, second), return_when=asyncio.FIRST_COMPLETED)
                if not drain.done():
                    logger.warning("drain cut short by %s", second.result().name)
                else:
                    drain.result()
            finally:
                for task in (drain, second):
                    task.cancel()
                    with contextlib.suppress(asyncio.CancelledError):
                        await task
        finally:
            for number in _SIGNALS:
                loop.remove_signal_handler(number)
            await self.stop()

    async def drain(self, draining: Callable[[], Awaitable[None]], grace: float) -> None:
        """Stop gently: health goes NOT_SERVING, new RPCs get UNAVAILABLE, running ones may finish.

        `draining` is called meanwhile, to finish or hand over what long streams still carry. Whatever
        still runs after `grace` seconds is cancelled.
        """
        await self.set_serving(False)
        self._drained = True
        self._edge.refuse()
        try:
            async with asyncio.timeout(grace) as limit:
                await draining()
                await self._edge.idle.wait()
        except TimeoutError:
            if not limit.expired():
                raise
            logger.warning("cancelling what still runs after %g seconds", grace, extra={"rpcs": self._edge.num_active})
        finally:
            await self.stop()

    async def stop(self) -> None:
        """Stop at once: cancel what runs, and wait until its handlers are through."""
        await asyncio.gather(*(server.stop(None) for server in self._servers))
        try:
            async with asyncio.timeout(_UNWIND_SECONDS):
                await self._edge.idle.wait()
        except TimeoutError:
            logger.error("handlers still run %g seconds after they were cancelled", _UNWIND_SECONDS)


def _listen(server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials | None) -> int:
    """The port. Raises BindError."""
    try:
        if credentials is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise BindError(f"cannot listen on {address}: in use, or not an address of this machine") from error
