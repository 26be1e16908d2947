"""API keys and salts."""

from __future__ import annotations

import hashlib
import hmac

import pytest

from services.router.clients.tenants import Tenants
from shared.rpc.errors import Unauthenticated
from shared.security.api_keys import unlimited_keys

_KEYS = unlimited_keys({"key-a": "acme", "key-b": "globex", "key-a2": "acme"})
_TENANTS = Tenants(lambda: _KEYS, secret=b"deployment")


@pytest.mark.parametrize(
    ("credential", "tenant"),
    [
        ("Bearer key-a", "acme"),
        ("bearer key-b", "globex"),
        ("BEARER  key-a2 ", "acme"),
        (b"Bearer key-a", "acme"),
    ],
)
def test_a_known_key_names_its_tenant(credential: str | bytes, tenant: str) -> None:
    assert _TENANTS.authenticate([("user-agent", "x"), ("authorization", credential)]).tenant == tenant


@pytest.mark.parametrize(
    "metadata",
    [
        [],
        [("x-api-key", "key-a")],
        [("authorization", "key-a")],
        [("authorization", "Basic key-a")],
        [("authorization", "Bearer ")],
        [("authorization", "Bearer key")],
        [("authorization", "Bearer key-aa")],
        [("authorization", "Bearer KEY-A")],
        [("authorization", "Bearer ключ")],
        [("authorization", b"Bearer \xff")],
        [("authorization", "Bearer key-a"), ("authorization", "Bearer key-b")],
    ],
)
def test_anything_else_is_refused_without_repeating_it(metadata: list[tuple[str, str | bytes]]) -> None:
    with pytest.raises(Unauthenticated) as caught:
        _TENANTS.authenticate(metadata)
    assert "key-" not in str(caught.value)


def test_without_keys_everyone_is_the_same_tenant() -> None:
    tenants = Tenants(dict, secret=b"")
    assert tenants.authenticate([]).tenant == ""
    assert tenants.authenticate([("authorization", "Bearer whatever")]).tenant == ""
    assert tenants.cache_salt("") == b""


def test_salts_are_the_servers_own() -> None:
    assert _TENANTS.cache_salt("acme") == hmac.digest(b"deployment", b"acme", hashlib.sha256)
    assert _TENANTS.cache_salt("acme") != _TENANTS.cache_salt("globex")
    other = Tenants(lambda: _KEYS, secret=b"another deployment")
    assert _TENANTS.cache_salt("acme") != other.cache_salt("acme")


@pytest.mark.parametrize(
    ("api_keys", "secret", "setting"),
    [({"key": "acme"}, b"", "secret"), ({"": "acme"}, b"s", "api_keys"), ({"key": ""}, b"s", "api_keys")],
)
def test_settings_that_would_not_separate_tenants_are_refused(
    api_keys: dict[str, str], secret: bytes, setting: str
) -> None:
    def make() -> Tenants:
        keys = unlimited_keys(api_keys)
        return Tenants(lambda: keys, secret)

    with pytest.raises(ValueError, match=setting):
        make()
