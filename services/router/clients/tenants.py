"""Who calls: API keys to tenants, and the salt that keeps one tenant's cached prefixes from another's."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Iterable, Mapping

from shared.rpc.errors import Unauthenticated
from shared.security.api_keys import ANYBODY, ApiKey, digest_of

_BEARER = "bearer "


class Tenants:
    """The tenants of this service.

    `keys` says at each call which API keys there are, by digest; with none, every caller is tenant "". `secret` is the
    deployment's own (the same on every router, or prefixes are not shared between them) and keeps salts from being
    guessed. Raises ValueError for keys without a secret.
    """

    def __init__(self, keys: Callable[[], Mapping[bytes, ApiKey]], secret: bytes) -> None:
        if keys() and not secret:
            raise ValueError("secret: must be set when there are API keys")
        self._keys = keys
        self._secret = secret

    def authenticate(self, metadata: Iterable[tuple[str, str | bytes]]) -> ApiKey:
        """The key in the call's metadata, `authorization: Bearer <API key>`; raises Unauthenticated."""
        keys = self._keys()
        if not keys:
            return ANYBODY
        credentials = [value for name, value in metadata if name.lower() == "authorization"]
        if len(credentials) != 1:
            raise Unauthenticated("metadata must hold one `authorization: Bearer <API key>`")
        credential = credentials[0].decode("latin-1") if isinstance(credentials[0], bytes) else credentials[0]
        if not credential.lower().startswith(_BEARER):
            raise Unauthenticated("metadata `authorization` must be `Bearer <API key>`")
        # Timing tells of digests at most, and from those there is no way back to a key.
        key = keys.get(digest_of(credential[len(_BEARER) :].strip()))
        if key is None:
            raise Unauthenticated("unknown API key")
        return key

    def cache_salt(self, tenant: str) -> bytes:
        """The extra key of a tenant's block hashes: HMAC-SHA256 (32 bytes) of its name; empty for tenant ""."""
        if not tenant:
            return b""
        return hmac.new(self._secret, tenant.encode(), hashlib.sha256).digest()
