"""The file of API keys, what it refuses, and the command that makes its entries."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from services.cli.app import app
from services.cli.key import key_entry
from shared.security.api_keys import ApiKey, digest_of, parse_api_keys

DIGEST = digest_of("a key").hex()
GOOD = f'[[key]]\ntenant = "anna"\nsha256 = "{DIGEST}"\n'


def test_keys_and_their_limits() -> None:
    other = digest_of("another")
    second = f'[[key]]\ntenant = "bert"\nsha256 = "{other.hex()}"\ntokens_per_minute = 10\nmax_tokens = 5'
    text = f"{GOOD}max_requests = 3\n\n{second}"
    assert parse_api_keys([text.encode()]) == {
        digest_of("a key"): ApiKey("anna", digest_of("a key"), max_requests=3),
        other: ApiKey("bert", other, tokens_per_minute=10, max_tokens=5),
    }


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", r"must hold tables \[\[key\]\]"),
        ("key = 1", r"must hold tables \[\[key\]\]"),
        ("key = [1]", "key 1 must be a table"),
        (f"{GOOD}[other]", r"must hold tables \[\[key\]\], and nothing else"),
        ("[[key", "is not TOML"),
        (GOOD.replace("tenant", "tenants"), "key 1 has no setting 'tenants'"),
        (GOOD.replace('"anna"', '""'), "key 1: tenant must be a name"),
        (GOOD.replace(DIGEST, DIGEST[1:]), "key 1: sha256 must be 64 hexadecimal digits"),
        (GOOD.replace(DIGEST, DIGEST.upper()), "key 1: sha256 must be 64 hexadecimal digits"),
        (GOOD + GOOD, "key 2 stands there twice"),
        (f"{GOOD}max_requests = 0", "key 1: max_requests is 0: must be a number from 1"),
        (f"{GOOD}max_tokens = true", "key 1: max_tokens is True: must be a number from 1"),
        (f"{GOOD}tokens_per_minute = 1.5", "key 1: tokens_per_minute is 1.5: must be a number from 1"),
    ],
)
def test_what_is_no_file_of_keys(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        parse_api_keys([text.encode()])


def test_a_key_written_in_place_of_its_hash_is_not_repeated() -> None:
    with pytest.raises(ValueError, match="key 1") as caught:
        parse_api_keys([GOOD.replace(DIGEST, "outrider-hush").encode()])
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize("tenant", ["anna", 'an "na"\n', "änna", "anna \U0001f600", "an\x7fna"])
def test_the_command_makes_an_entry_and_shows_the_key_once(tenant: str) -> None:
    arguments = ["key", tenant, "--max-requests=4", "--tokens-per-minute=1000", "--max-tokens=64"]
    results = [CliRunner().invoke(app, arguments) for _ in range(2)]
    assert [result.exit_code for result in results] == [0, 0]
    keys = [result.stderr.rpartition(": ")[2].strip() for result in results]
    assert len(set(keys)) == 2
    assert parse_api_keys([(results[0].stdout + results[1].stdout).encode()]) == {
        digest_of(key): ApiKey(tenant, digest_of(key), 4, 1000, 64) for key in keys
    }
    assert keys[0] not in results[0].stdout


def test_an_entry_that_is_half_written_lifts_no_limits() -> None:
    entry = key_entry("outrider-secret", "acme", {"max_requests": 2, "tokens_per_minute": 600, "max_tokens": 8})
    whole = parse_api_keys([entry.encode()])
    for length in range(len(entry)):
        try:
            found = parse_api_keys([entry[:length].encode()])
        except ValueError:
            continue
        assert found == whole
