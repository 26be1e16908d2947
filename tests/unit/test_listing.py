"""A listing's encoding, and what is none."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from shared.registry.listing import Listing

TARGET = Listing("target", "0f-A_b.9", "worker-3.example_net:50052", "prefill")
FIELDS = {"address": "worker-3:50052", "instance_id": "a", "kind": "target", "role": "both"}


def changed(**fields: object) -> bytes:
    return json.dumps(FIELDS | fields).encode()


@pytest.mark.parametrize(
    "listing",
    [
        TARGET,
        Listing("target", "a", "10.0.0.7:1", "both"),
        Listing("target", "a", "[::1]:65535", "decode"),
        Listing("target", "a" * 128, "[fe80::1%eth0.2]:50052", "decode"),
        Listing("draft", "a", "localhost:50051", ""),
    ],
)
def test_what_is_encoded_is_decoded(listing: Listing) -> None:
    assert Listing.decode(listing.encode()) == listing


def test_the_encoding_is_json_with_sorted_keys() -> None:
    expected = (
        '{"address": "worker-3.example_net:50052", "instance_id": "0f-A_b.9", "kind": "target", "role": "prefill"}'
    )
    assert TARGET.encode() == expected.encode()


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "Expecting value"),
        (b"\xff\xfe", "can't decode byte 0xff"),
        (json.dumps(FIELDS).encode("utf-16"), "can't decode byte 0xff"),
        (b"[" * 4096, "nested too deeply"),
        (b'{"kind":' * 500, "nested too deeply|Expecting value"),
        (changed() + b" " * 4096, "more than 4096 bytes"),
        (changed()[:-1], "Expecting ',' delimiter"),
        (changed() * 2, "Extra data"),
        (b"9" * 4096, "not an object of kind, instance_id, address, role"),
        (b"null", "not an object of"),
        (b'["address", "instance_id", "kind", "role"]', "not an object of"),
        (b"{}", "not an object of"),
        (changed(more="x"), "not an object of"),
        (changed(address=["worker-3:50052"]), "a field that is not a text"),
        (changed(instance_id=None), "a field that is not a text"),
        (changed(kind={"a": 1}), "a field that is not a text"),
        (changed(role=float("nan")), "a field that is not a text"),
        (changed(kind="router"), "kind 'router' is neither 'target' nor 'draft'"),
        (changed(kind="k" * 3000), "kind 'k{79} is neither"),
        (changed(kind="Target"), "is neither"),
        (changed(role="prefil"), "role 'prefil' of a target is none of"),
        (changed(role=""), "role '' of a target is none of"),
        (changed(kind="draft"), "role 'both' of a draft is none of"),
        (changed(instance_id=""), "instance_id '' is not"),
        (changed(instance_id="a" * 129), "instance_id 'a{79} is not"),
        (changed(instance_id="a\n"), r"instance_id 'a\\n' is not"),
        (changed(instance_id="\u0663"), "instance_id '\u0663' is not"),
        (changed(instance_id="\ud800"), r"instance_id '\\ud800' is not"),
        (changed(instance_id="a\x00b"), r"instance_id 'a\\x00b' is not"),
    ],
)
def test_anything_else_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Listing.decode(data)


@pytest.mark.parametrize(
    "address",
    [
        *("", "worker-3", "worker-3:", ":50052", "worker-3:0", "worker-3:65536", "worker-3:-1", "worker-3:50052\n"),
        *("worker 3:50052", "::1:50052", "[]:50052", "[::1]", "worker-3:\u0665", "worker-3:5e4", "a:1,b:2"),
        *("unix:/tmp/socket:1", "unix:///tmp/socket:1", "dns:///worker-3:50052", "user@worker-3:50052"),
        *("xn--wörker:50052", f"{'a' * 254}:50052"),
    ],
)
def test_an_address_is_a_host_and_a_port(address: str) -> None:
    with pytest.raises(ValueError, match=r"address .* is not host:port, with a port from 1 to 65535"):
        Listing("target", "a", address, "both")


def test_damaged_encodings_are_refused_or_are_listings() -> None:
    generator = random.Random(5)
    encoded = TARGET.encode()
    num_refused = 0
    for _ in range(20_000):
        data = bytearray(encoded)
        for _ in range(generator.randint(1, 3)):
            at = generator.randrange(len(data))
            piece: Any = generator.choice([b"", bytes([generator.randrange(256)]), data[at : at + 20]])
            data[at : at + generator.randint(0, 3)] = piece
        try:
            listing = Listing.decode(bytes(data))
        except ValueError:
            num_refused += 1
        else:
            assert Listing.decode(listing.encode()) == listing
    assert 10_000 < num_refused < 20_000
