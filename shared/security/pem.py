"""Certificates and keys, as they come in PEM files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key
from cryptography.x509 import Certificate, load_pem_x509_certificates


class Chain(NamedTuple):
    """PEM: a chain of certificates whose first is one's own, and its private key."""

    certificates: bytes
    key: bytes


def parse_chain(contents: Sequence[bytes]) -> Chain:
    """Of two files. Raises ValueError if they are not, or the key is another's."""
    chain = Chain(*contents)
    own = _certificates(chain.certificates, "certificate")[0]
    try:
        key = load_pem_private_key(chain.key, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        # Not its text: nothing of a key is to come into a log.
        raise ValueError("no private key, or one with a passphrase") from error
    if _encoded(key.public_key()) != _encoded(own.public_key()):
        raise ValueError("the private key is not that of the certificate")
    return chain


def parse_authorities(contents: Sequence[bytes]) -> bytes:
    """Of one file: PEM of those whose signatures count. Raises ValueError."""
    (authorities,) = contents
    _certificates(authorities, "certificate of an authority")
    return authorities


def _certificates(pem: bytes, what: str) -> list[Certificate]:
    try:
        return load_pem_x509_certificates(pem)
    except ValueError as error:
        raise ValueError(f"no {what}") from error


def _encoded(public_key: object) -> bytes:
    encoded: bytes = public_key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)  # type: ignore[attr-defined]
    return encoded
