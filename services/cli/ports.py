"""Ports for the services of a local stack."""

from __future__ import annotations

import os
import random
import socket

from shared.settings import StartupError

# A port is chosen some time before the service listens on it. Those that systems give to outgoing connections (from
# 32768 on in Linux, 49152 elsewhere) may be taken by then.
_FREE_PORTS = range(10_000, 32_768)
_NUM_TRIES = 100


def free_ports(host: str, count: int) -> list[int]:
    """That many different ports that nothing listens on. Raises StartupError if they are not to be found."""
    found: set[int] = set()
    for _ in range(_NUM_TRIES * count):
        if len(found) == count:
            break
        port = random.choice(_FREE_PORTS)
        if _complaint(host, port) is None:
            found.add(port)
    else:
        raise StartupError(f"no free port on {host}: {_complaint(host, 0) or 'all that were tried are taken'}")
    return list(found)


def claim_port(host: str, port: int) -> int:
    """`port`, or a free one for 0. Raises StartupError if it is taken: gRPC itself would share it silently."""
    if port == 0:
        return free_ports(host, 1)[0]
    if (complaint := _complaint(host, port)) is not None:
        raise StartupError(f"port {port} on {host} cannot be listened on: {complaint}")
    return port


def _complaint(host: str, port: int) -> str | None:
    """Why nobody could listen there; None: somebody could."""
    try:
        socket.create_server((host, port)).close()
    except OSError as error:
        return os.strerror(error.errno or 0)
    return None
