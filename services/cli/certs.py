"""`outrider certs`: an authority of one's own and a certificate for each service, to try TLS with."""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, NamedTuple, get_args

import typer
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from cryptography.x509 import (
    AuthorityKeyIdentifier,
    BasicConstraints,
    Certificate,
    CertificateBuilder,
    DNSName,
    ExtendedKeyUsage,
    GeneralName,
    IPAddress,
    KeyUsage,
    Name,
    NameAttribute,
    SubjectAlternativeName,
    SubjectKeyIdentifier,
    load_pem_x509_certificate,
    random_serial_number,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from shared.registry.keys import DEFAULT_DEPLOYMENT
from shared.security.identity import Service, certificate_name

_AUTHORITY_VALID = timedelta(days=3650)
# Clocks differ.
_SLACK = timedelta(minutes=5)


DeploymentOption = Annotated[str, typer.Option(metavar="NAME", help="The deployment whose services are named.")]
HostOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME",
        help="Name or address by which clients reach the router, beside those it has; may be given often.",
        show_default="localhost, 127.0.0.1",
    ),
]
DaysOption = Annotated[int, typer.Option(metavar="N", min=1, max=3650, help="How long the certificates are valid.")]


class _Signed(NamedTuple):
    certificate: Certificate
    key: ec.EllipticCurvePrivateKey


def certs(
    folder: Annotated[Path, typer.Argument(help="Where they go; an authority that is there already goes on signing.")],
    deployment: DeploymentOption = DEFAULT_DEPLOYMENT,
    host: HostOption = None,
    days: DaysOption = 90,
) -> None:
    """Make an authority and certificates for trying TLS: a file and its -key for router, target, draft and client."""
    try:
        for path in write_certificates(folder, deployment, host or [], timedelta(days=days)):
            typer.echo(path)
    except (OSError, ValueError) as error:
        typer.echo(f"outrider: no certificates in {folder}: {error}", err=True)
        raise typer.Exit(1) from None


def write_certificates(folder: Path, deployment: str, hosts: list[str], valid: timedelta) -> list[Path]:
    """Writes them, and returns where. `hosts`: the router's names and addresses, for clients, beside localhost and
    those in its present certificate: one made anew must not shut out who came by the old one.

    Raises OSError; ValueError if what is there already is no authority, or no certificate.
    """
    folder.mkdir(parents=True, exist_ok=True)
    authority = _authority(folder)
    given = [_general_name(host) for host in ("localhost", "127.0.0.1", *hosts)]
    # The first says who it is.
    reached_by = dict.fromkeys([*given, *_names_in(folder / "router.pem")[1:]])
    written = [folder / "ca.pem"]
    for service in get_args(Service):
        names: list[GeneralName] = [DNSName(certificate_name(service, deployment))]
        if service == "router":
            names += reached_by
        written += _write_pair(folder, service, _sign(authority, names, valid))
    return written


def write_server_certificate(folder: Path, name: str, hosts: list[str], valid: timedelta) -> list[Path]:
    """Writes one more, of a server that is none of the services, and returns where: for `hosts`, and those that the
    present one has. Raises as `write_certificates`."""
    names = dict.fromkeys([*map(_general_name, hosts), *_names_in(folder / f"{name}.pem")])
    return _write_pair(folder, name, _sign(_authority(folder), list(names), valid))


def _write_pair(folder: Path, name: str, signed: _Signed) -> list[Path]:
    certificate_path, key_path = folder / f"{name}.pem", folder / f"{name}-key.pem"
    _write(certificate_path, key_path, signed)
    return [certificate_path, key_path]


def _names_in(certificate_path: Path) -> list[GeneralName]:
    """The names of the certificate that is there; none without it."""
    if not certificate_path.exists():
        return []
    certificate = load_pem_x509_certificate(certificate_path.read_bytes())
    return list(certificate.extensions.get_extension_for_class(SubjectAlternativeName).value)


def _authority(folder: Path) -> _Signed:
    certificate_path, key_path = folder / "ca.pem", folder / "ca-key.pem"
    if certificate_path.exists() and key_path.exists():
        key = load_pem_private_key(key_path.read_bytes(), password=None)
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise ValueError("ca-key.pem is not a key that this command made")
        return _Signed(load_pem_x509_certificate(certificate_path.read_bytes()), key)
    if certificate_path.exists():
        raise ValueError("ca.pem is there, and ca-key.pem is not")
    key = ec.generate_private_key(ec.SECP256R1())
    name = Name([NameAttribute(NameOID.COMMON_NAME, "Outrider test authority")])
    certificate = (
        _builder(name, name, key, _AUTHORITY_VALID)
        .add_extension(BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs_certificates=True), critical=True)
        .add_extension(SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, SHA256())
    )
    signed = _Signed(certificate, key)
    _write(certificate_path, key_path, signed)
    return signed


def _sign(authority: _Signed, names: list[GeneralName], valid: timedelta) -> _Signed:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = Name([NameAttribute(NameOID.COMMON_NAME, str(names[0].value)[:64])])
    certificate = (
        _builder(authority.certificate.subject, subject, key, valid)
        .add_extension(BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(signs_certificates=False), critical=True)
        .add_extension(SubjectAlternativeName(names), critical=False)
        .add_extension(
            ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False
        )
        .add_extension(AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key()), critical=False)
        .sign(authority.key, SHA256())
    )
    return _Signed(certificate, key)


def _builder(issuer: Name, subject: Name, key: ec.EllipticCurvePrivateKey, valid: timedelta) -> CertificateBuilder:
    now = datetime.now(UTC)
    return (
        CertificateBuilder()
        .issuer_name(issuer)
        .subject_name(subject)
        .public_key(key.public_key())
        .serial_number(random_serial_number())
        .not_valid_before(now - _SLACK)
        .not_valid_after(now + valid)
    )


def _key_usage(*, signs_certificates: bool) -> KeyUsage:
    return KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _general_name(host: str) -> GeneralName:
    try:
        return IPAddress(ip_address(host))
    except ValueError:
        return DNSName(host)


def _write(certificate_path: Path, key_path: Path, signed: _Signed) -> None:
    """Both are replaced at once each, the key first: who reads between the two finds that they do not match, and
    looks again."""
    key = signed.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    for path, content, mode in (
        (key_path, key, 0o600),
        (certificate_path, signed.certificate.public_bytes(Encoding.PEM), 0o644),
    ):
        temporary = path.with_suffix(".new")
        # One that is left over may be open to others.
        temporary.unlink(missing_ok=True)
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(content)
        temporary.replace(path)
