"""TLS of a server, by files that may be replaced while it listens."""

from __future__ import annotations

import grpc

from shared.security.pem import Chain
from shared.security.watched_files import WatchedFiles


def server_credentials(own: WatchedFiles[Chain], authorities: WatchedFiles[bytes] | None) -> grpc.ServerCredentials:
    """The server shows `own`; with `authorities` callers have to show a certificate that one of those has signed.

    What is in the files when somebody connects counts.
    """

    def configuration() -> grpc.ServerCertificateConfiguration:
        chain, key = own.current()
        roots = None if authorities is None else authorities.current()
        return grpc.ssl_server_certificate_configuration([(key, chain)], root_certificates=roots)

    return grpc.dynamic_ssl_server_credentials(configuration(), configuration, authorities is not None)
