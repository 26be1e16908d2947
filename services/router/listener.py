"""What clients connect to: TLS with a certificate of the router's own, or plain text."""

from __future__ import annotations

import logging

import grpc

from services.router.settings import RouterSettings
from shared.rpc.loopback import is_loopback
from shared.security.pem import parse_authorities, parse_chain
from shared.security.server_credentials import server_credentials
from shared.security.watched_files import WatchedFiles

logger = logging.getLogger(__name__)


def public_credentials(settings: RouterSettings) -> grpc.ServerCredentials | None:
    """None: plain text, as TLS may end before the router. Raises StartupError if the files cannot be used."""
    certificate, key = settings.public_cert or settings.tls_cert, settings.public_key or settings.tls_key
    if certificate is None or key is None:
        if not is_loopback(settings.host):
            logger.warning("clients are served in plain text, unless something before the router speaks TLS")
        return None
    authorities = None if settings.client_ca is None else WatchedFiles([settings.client_ca], parse_authorities)
    return server_credentials(WatchedFiles([certificate, key], parse_chain), authorities)
