"""Who a service is to the others of its deployment, and who they are to it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, TypeAlias

import grpc

from shared.rpc.authorized_channel import AuthorizedChannel
from shared.rpc.channel import connect
from shared.rpc.errors import PermissionDenied
from shared.rpc.options import CHANNEL_OPTIONS
from shared.security.pem import Chain, parse_authorities, parse_chain
from shared.security.server_credentials import server_credentials
from shared.security.token import check_token, parse_tokens, token_metadata
from shared.security.watched_files import WatchedFiles
from shared.settings import ServiceSettings

Service: TypeAlias = Literal["router", "target", "draft", "client"]


def certificate_name(service: Service, deployment: str) -> str:
    """The DNS name in the certificate (subjectAltName) of a service, wherever it runs."""
    return f"{service}.{deployment}.outrider"


class Identity:
    """A service's certificate, the token it shares with others, both, or neither.

    With a certificate every connection is TLS, and each side shows one: a caller knows whom it reaches, and who is
    called who calls, by the names in them. Addresses count for nothing, so that workers may come and go. Files that
    change count from the next connection on; those that stand go on.
    """

    def __init__(
        self,
        own: WatchedFiles[Chain] | None,
        authorities: WatchedFiles[bytes] | None,
        tokens: WatchedFiles[tuple[str, ...]] | None,
        deployment: str,
    ) -> None:
        """`own` goes with `authorities`."""
        self._own = own
        self._authorities = authorities
        self._tokens = tokens
        self._deployment = deployment

    @classmethod
    def of(cls, settings: ServiceSettings, deployment: str) -> Identity:
        """Raises StartupError if its files cannot be used."""
        own = authorities = tokens = None
        if settings.tls_cert is not None and settings.tls_key is not None and settings.tls_ca is not None:
            own = WatchedFiles([settings.tls_cert, settings.tls_key], parse_chain)
            authorities = WatchedFiles([settings.tls_ca], parse_authorities)
        if settings.token_file is not None:
            tokens = WatchedFiles([settings.token_file], parse_tokens)
        return cls(own, authorities, tokens, deployment)

    @property
    def is_shown(self) -> bool:
        """Whether there is anything that others can be told from strangers by."""
        return self._own is not None or self._tokens is not None

    @property
    def generation(self) -> int:
        """Another number once certificates were replaced: channels from before go by the old ones."""
        files = [each for each in (self._own, self._authorities) if each is not None]
        for each in files:
            each.current()
        return sum(each.generation for each in files)

    def connect(self, address: str, service: Service) -> grpc.aio.Channel:
        """A channel to such a service at `address` (host:port), with connections of its own.

        It connects at the first call, and again by itself after a loss, by the certificates of now. No call is
        repeated.
        """
        channel = self._channel(address, service)
        if self._tokens is None:
            return channel
        tokens = self._tokens
        return AuthorizedChannel(channel, lambda: token_metadata(tokens.current()))

    def _channel(self, address: str, service: Service) -> grpc.aio.Channel:
        if self._own is None or self._authorities is None:
            return connect(address)
        chain, key = self._own.current()
        credentials = grpc.ssl_channel_credentials(self._authorities.current(), key, chain)
        name = ("grpc.ssl_target_name_override", certificate_name(service, self._deployment))
        return grpc.aio.secure_channel(address, credentials, options=(*CHANNEL_OPTIONS, name))

    def server_credentials(self) -> grpc.ServerCredentials | None:
        """What a server of others' calls listens with: TLS in which they show certificates as well; None is plain."""
        return None if self._own is None else server_credentials(self._own, self._authorities)

    def authenticate(self, metadata: Iterable[tuple[str, str | bytes]]) -> None:
        """Raises Unauthenticated if callers have to show a token, and the call's metadata shows none."""
        if self._tokens is not None:
            check_token(self._tokens.current(), metadata)

    def check_caller(self, callers: Iterable[Service], context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """Raises PermissionDenied if callers have to show certificates, and the caller's is not that of one of those
        services, of this deployment."""
        if self._own is None:
            return
        allowed = {certificate_name(service, self._deployment) for service in callers}
        # Not grpc's `peer_identities`, for which the subject will do where there is no such name.
        names = context.auth_context().get("x509_subject_alternative_name") or ()
        shown = {name.decode("utf-8", "replace") for name in names}
        if not allowed & shown:
            raise PermissionDenied(
                f"the certificate is that of {', '.join(sorted(shown)) or 'nobody'}: callers here are "
                f"{', '.join(sorted(allowed))}"
            )


PLAIN = Identity(None, None, None, "")
"""Nobody in particular, among others who are: on one machine."""
