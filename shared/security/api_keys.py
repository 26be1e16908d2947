"""API keys, and what may be done with each: from settings, or from a file that may be replaced at any time."""

from __future__ import annotations

import hashlib
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_LIMITS = ("max_requests", "tokens_per_minute", "max_tokens")
_DIGEST = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class ApiKey:
    """Whose a key is, and its limits; None is no limit.

    `digest`: SHA-256 of the key, by which it is known. `max_requests`: of those at once, waiting ones as well.
    `tokens_per_minute`: of prompts and outputs. `max_tokens`: of a request's `max_tokens`.
    """

    tenant: str
    digest: bytes
    max_requests: int | None = None
    tokens_per_minute: int | None = None
    max_tokens: int | None = None


ANYBODY = ApiKey("", b"")
"""Who calls where no key is needed."""


def digest_of(key: str) -> bytes:
    """Of keys with as much chance in them as `outrider key` makes; a guessable one is not made safe by it."""
    return hashlib.sha256(key.encode()).digest()


def unlimited_keys(tenant_by_key: Mapping[str, str]) -> dict[bytes, ApiKey]:
    """Keys without limits, by digest. Raises ValueError for an empty key or name."""
    if not all(tenant_by_key) or not all(tenant_by_key.values()):
        raise ValueError("api_keys: an API key and its tenant's name must not be empty")
    return {digest_of(key): ApiKey(tenant, digest_of(key)) for key, tenant in tenant_by_key.items()}


def parse_api_keys(contents: Sequence[bytes]) -> dict[bytes, ApiKey]:
    """Of one file, by digest: TOML with a table `[[key]]` each. Raises ValueError that names what is wrong."""
    (content,) = contents
    try:
        tables = tomllib.loads(content.decode())
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"is not TOML: {error}") from error
    entries = tables.pop("key", None)
    if tables or not isinstance(entries, list) or not entries:
        raise ValueError("must hold tables [[key]], and nothing else")
    keys: dict[bytes, ApiKey] = {}
    for number, entry in enumerate(entries, start=1):
        key = _parse_entry(entry, f"key {number}")
        if key.digest in keys:
            raise ValueError(f"key {number} stands there twice")
        keys[key.digest] = key
    return keys


def _parse_entry(entry: Any, name: str) -> ApiKey:
    if not isinstance(entry, dict):
        raise ValueError(f"{name} must be a table")
    unknown = set(entry) - {"tenant", "sha256", *_LIMITS}
    if unknown:
        raise ValueError(f"{name} has no setting {min(unknown)!r}")
    tenant, digest = entry.get("tenant"), entry.get("sha256")
    if not isinstance(tenant, str) or not tenant:
        raise ValueError(f"{name}: tenant must be a name")
    # Not what stands there: it may be the key itself, by mistake.
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise ValueError(f"{name}: sha256 must be 64 hexadecimal digits, the SHA-256 of the key")
    limits = {limit: entry[limit] for limit in _LIMITS if limit in entry}
    for limit, value in limits.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name}: {limit} is {value!r}: must be a number from 1")
    return ApiKey(tenant, bytes.fromhex(digest), **limits)
