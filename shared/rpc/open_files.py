"""Open files: as many as the process may have, and how many of them those who connect may take."""

from __future__ import annotations

import resource
from typing import Final

SERVICE_SHARE: Final = 0.75
"""Of the limit, for connections to a service's own port."""
HEALTH_SHARE: Final = 0.1
"""For those to the port for probes. What is left is for connections that this process makes, and for files."""

# Where a process may have many more: beyond, each costs memory (some 13 KiB; by TLS some 60) for nobody's good.
_MOST_FILES = 65_536
_MOST_CONNECTIONS = 16_384


def allow_open_files() -> None:
    """Raises the process's limit to what it may have: systems give 1,024, for the sake of programs older than this."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def most_connections(share: float) -> int:
    """Connections that a port takes at once; who comes then is hung up on, and comes again."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST_CONNECTIONS if soft == resource.RLIM_INFINITY else min(int(share * soft), _MOST_CONNECTIONS)
