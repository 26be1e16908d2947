"""`outrider secrets`: who gets what, what a second run changes, and what the services' Redis user may do."""

from __future__ import annotations

import asyncio
import hashlib
import tomllib
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key
from cryptography.x509 import DNSName, SubjectAlternativeName, load_pem_x509_certificate
from redis import Redis
from redis.exceptions import RedisError
from typer.testing import CliRunner

from services.cli.app import app
from shared.prefix.block_hash import hash_blocks, root_hash
from shared.prefix.index import PrefixIndex
from shared.prefix.payload_index import PayloadIndex
from shared.prefix.publisher import PrefixPublisher
from shared.prefix.store import PrefixStore
from shared.redis.server import RedisServer
from shared.registry.directory import Directory
from shared.registry.listing import Listing
from shared.registry.member import Member
from shared.security.api_keys import digest_of, parse_api_keys

CERTIFIED = {"ca.pem", "cert.pem", "key.pem"}
PATIENT = 20.0
DEADLINE_SECONDS = 30.0


def make(folder: Path, *options: str) -> None:
    result = CliRunner().invoke(app, ["secrets", str(folder), *options])
    assert result.exit_code == 0, result.output


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("secrets") / "of-mine"
    make(folder, "--deployment", "blue", "--host", "router.example")
    return folder


def names_of(certificate: Path) -> list[str]:
    extension = load_pem_x509_certificate(certificate.read_bytes()).extensions.get_extension_for_class(
        SubjectAlternativeName
    )
    return extension.value.get_values_for_type(DNSName)


def test_each_has_its_own_and_nothing_else(made: Path) -> None:
    found = {
        folder.name: {path.name for path in folder.iterdir()} for folder in made.iterdir() if folder.name != "authority"
    }
    assert found == {
        "router": CERTIFIED | {"redis-password", "token", "api-keys.toml", "settings.toml"},
        "target": CERTIFIED | {"redis-password", "token"},
        "draft": CERTIFIED | {"redis-password", "token"},
        "client": CERTIFIED | {"api-key"},
        "redis": CERTIFIED | {"password", "users.acl"},
    }
    keys = [path.read_bytes() for path in made.rglob("*key.pem") if path.parent.name != "authority"]
    assert len(set(keys)) == 5
    assert (made / "authority" / "ca-key.pem").read_bytes() not in keys


def test_nobody_else_may_enter_and_other_users_may_read_within(made: Path) -> None:
    assert made.stat().st_mode & 0o777 == 0o700
    assert (made / "authority" / "ca-key.pem").stat().st_mode & 0o777 == 0o600
    for name in ("router", "target", "draft", "redis", "client"):
        assert (made / name).stat().st_mode & 0o777 == 0o755
        assert {path.stat().st_mode & 0o777 for path in (made / name).iterdir()} == {0o644}


@pytest.mark.parametrize(
    ("service", "names"),
    [
        ("router", ["router.blue.outrider", "localhost", "router.example"]),
        ("target", ["target.blue.outrider"]),
        ("draft", ["draft.blue.outrider"]),
        ("client", ["client.blue.outrider"]),
        ("redis", ["redis"]),
    ],
)
def test_certificates_name_who_has_them(made: Path, service: str, names: list[str]) -> None:
    certificate = load_pem_x509_certificate((made / service / "cert.pem").read_bytes())
    key = load_pem_private_key((made / service / "key.pem").read_bytes(), None)
    public = (Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    assert key.public_key().public_bytes(*public) == certificate.public_key().public_bytes(*public)
    assert names_of(made / service / "cert.pem") == names
    certificate.verify_directly_issued_by(load_pem_x509_certificate((made / "redis" / "ca.pem").read_bytes()))


def test_the_routers_files_are_taken_as_they_are(made: Path) -> None:
    keys = parse_api_keys([(made / "router" / "api-keys.toml").read_bytes()])
    key = (made / "client" / "api-key").read_text().strip()
    assert [each.tenant for each in keys.values()] == ["default"]
    assert digest_of(key) in keys
    settings = tomllib.loads((made / "router" / "settings.toml").read_text())
    assert len(settings["router"].pop("cache_secret")) >= 16
    assert settings == {"router": {}}


def test_a_second_run_changes_certificates_alone(made: Path, tmp_path: Path) -> None:
    folder = tmp_path / "again"
    make(folder)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    (folder / "router" / "api-keys.toml").write_text("mine\n")
    make(folder)
    after = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert after.keys() == before.keys()
    changed = {path.name for path in before if after[path] != before[path]}
    own = {f"{name}{kind}.pem" for name in ("router", "target", "draft", "client", "redis") for kind in ("", "-key")}
    assert changed == own | {"cert.pem", "key.pem", "api-keys.toml"}
    assert (folder / "router" / "api-keys.toml").read_text() == "mine\n"


def test_a_second_run_keeps_names_by_which_others_come(tmp_path: Path) -> None:
    folder = tmp_path / "again"
    make(folder, "--deployment=blue", "--host=a.example", "--redis-host=store.example")
    make(folder, "--deployment=green", "--host=b.example")
    assert names_of(folder / "router" / "cert.pem") == ["router.green.outrider", "localhost", "b.example", "a.example"]
    assert names_of(folder / "redis" / "cert.pem") == ["redis", "store.example"]


def test_a_folder_without_its_authority_is_told(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    make(folder)
    (folder / "authority" / "ca-key.pem").unlink()
    result = CliRunner().invoke(app, ["secrets", str(folder)])
    assert result.exit_code == 1
    assert result.stderr == f"outrider: no secrets in {folder}: ca.pem is there, and ca-key.pem is not\n"


def test_a_folder_of_other_things_is_left_as_it_is(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir(mode=0o755)
    (folder / "thesis.tex").write_text("x")
    result = CliRunner().invoke(app, ["secrets", str(folder)])
    assert (result.exit_code, result.stderr) == (1, f"outrider: no secrets in {folder}: it holds other things\n")
    assert [path.name for path in folder.iterdir()] == ["thesis.tex"]
    assert folder.stat().st_mode & 0o777 == 0o755


def test_an_api_key_that_its_client_took_along_is_not_made_anew(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    make(folder)
    (folder / "client" / "api-key").unlink()
    before = (folder / "router" / "api-keys.toml").read_bytes()
    make(folder)
    assert not (folder / "client" / "api-key").exists()
    assert (folder / "router" / "api-keys.toml").read_bytes() == before


# The user of Redis


async def test_the_services_user_may_do_what_they_do_and_nothing_else(made: Path) -> None:
    password = (made / "target" / "redis-password").read_text().strip()
    assert (made / "redis" / "password").read_text().strip() == password
    default, user = (made / "redis" / "users.acl").read_text().splitlines()
    assert default == "user default off"
    assert hashlib.sha256(password.encode()).hexdigest() in user
    assert password not in user
    with RedisServer() as server:
        with Redis.from_url(server.url) as owner:
            owner.execute_command("ACL", "SETUSER", *user.split()[1:])
            owner.set("others", "value")
        url = f"redis://outrider:{password}@127.0.0.1:{urlsplit(server.url).port}/0"
        await _serve_by(url)
        with Redis.from_url(url) as client:
            for command in (
                ("FLUSHALL",),
                ("KEYS", "*"),
                ("CONFIG", "GET", "*"),
                ("ACL", "LIST"),
                ("SHUTDOWN", "NOSAVE"),
                ("GET", "others"),
                ("SET", "others", "mine"),
                ("EVAL", "return redis.call('GET', 'others')", 0),
                ("PUBLISH", "outrider:news", "mine"),
            ):
                with pytest.raises(RedisError, match=r"(?i)permission|can't access"):
                    client.execute_command(*command)


async def _serve_by(url: str) -> None:
    """All that services do with Redis."""
    blocks = hash_blocks(range(8), 4, root_hash("model", b""))
    listing = Listing("target", "t-1", "127.0.0.1:50052", "both")
    directory, index = Directory(url), PrefixIndex(url, "model", timeout_seconds=PATIENT)
    payloads = PayloadIndex(url, "model", timeout_seconds=PATIENT)
    try:
        async with (
            asyncio.timeout(DEADLINE_SECONDS),
            Member(url, "default", listing),
            PrefixPublisher(url, "model", "t-1", lambda: blocks),
            PrefixStore(url, "model", 64, max_bytes=1 << 20, ttl_seconds=3600.0, max_pending_bytes=1 << 20) as store,
        ):
            for block in blocks:
                store.put(block, b"x" * 64)
            while not await directory.list():  # noqa: ASYNC110 - Redis does not tell
                await asyncio.sleep(0.01)
            while await index.lookup(blocks, ["t-1"]) != {"t-1": 2}:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            while await payloads.depth(blocks) != 2:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            assert await store.get(blocks, PATIENT) == [b"x" * 64] * 2
    finally:
        await asyncio.gather(directory.close(), index.close(), payloads.close())
