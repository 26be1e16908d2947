"""Who calls: API keys to tenants, and the salt that keeps one tenant's cached prefixes from another's."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Mapping

from shared.rpc.errors import Unauthenticated

_BEARER = "bearer "


class Tenants:
    """The tenants of this service.

    `api_keys` maps each API key to its tenant's name; with none, every caller is tenant "". `secret` is
    the deployment's own (the same on every router, or prefixes are not shared between them) and keeps
    salts from being guessed. Raises ValueError for an empty key or name, or keys without a secret.
    """

    def __init__(self, api_keys: Mapping[str, str], secret: bytes) -> None:
        if not all(api_keys) or not all(api_keys.values()):
            raise ValueError("api_keys: an API key and its tenant's name must not be empty")
        if api_keys and not secret:
            raise ValueError("secret: must be set when api_keys are")
        self._tenant_by_key = {key.encode(): tenant for key, tenant in api_keys.items()}
        self._secret = secret

    def authenticate(self, metadata: Iterable[tuple[str, str | bytes]]) -> str:
        """The tenant named by the call's metadata, `authorization: Bearer <API key>`; raises Unauthenticated."""
        if not self._tenant_by_key:
            return ""
        credentials = [value for name, value in metadata if name.lower() == "authorization"]
        if len(credentials) != 1:
            raise Unauthenticated("metadata must hold one `authorization: Bearer <API key>`")
        credential = credentials[0].decode("latin-1") if isinstance(credentials[0], bytes) else credentials[0]
        if not credential.lower().startswith(_BEARER):
            raise Unauthenticated("metadata `authorization` must be `Bearer <API key>`")
        presented = credential[len(_BEARER) :].strip().encode()
        # Every key is compared, each in constant time, so that timing tells nothing about any.
        tenants = [tenant for key, tenant in self._tenant_by_key.items() if hmac.compare_digest(key, presented)]
        if not tenants:
            raise Unauthenticated("unknown API key")
        return tenants[0]

    def cache_salt(self, tenant: str) -> bytes:
        """The extra key of a tenant's block hashes: HMAC-SHA256 (32 bytes) of its name; empty for tenant ""."""
        if not tenant:
            return b""
        return hmac.new(self._secret, tenant.encode(), hashlib.sha256).digest()
