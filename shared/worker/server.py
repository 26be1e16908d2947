"""The server of a worker, which takes calls from its deployment's services alone."""

from __future__ import annotations

import logging
from functools import partial

from shared.rpc.loopback import is_loopback
from shared.rpc.server import RpcServer
from shared.security.identity import Identity, Service
from shared.settings import StartupError
from shared.telemetry.tracing import Telemetry
from shared.worker.settings import WorkerSettings

logger = logging.getLogger(__name__)


def worker_server(
    settings: WorkerSettings, identity: Identity, telemetry: Telemetry, callers: tuple[Service, ...]
) -> RpcServer:
    """A server on the address of the settings, for the services `callers`.

    Raises StartupError where strangers could reach it and nothing tells them from those, unless that is wanted.
    """
    if not identity.is_shown and not is_loopback(settings.host):
        if not settings.insecure:
            raise StartupError(
                f"host is {settings.host}, where anybody may call: set tls_cert, tls_key and tls_ca, or token_file, "
                "or insecure"
            )
        logger.warning("anybody who reaches this worker may use it, and read what it computes")
    return RpcServer(
        f"{settings.host}:{settings.port}",
        telemetry,
        credentials=identity.server_credentials(),
        health_address=settings.health_address,
        authenticate=identity.authenticate,
        check_caller=partial(identity.check_caller, callers),
    )
