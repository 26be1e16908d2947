"""Payload framing: what was packed comes back, and nothing else ever does."""

from __future__ import annotations

import hashlib
import random

import pytest

from shared.prefix.payload import HEADER_BYTES, CorruptPayload, pack, unpack

LAYOUT = "layout-a"
BLOCK = hashlib.sha256(b"block").digest()
PAYLOAD = random.Random(1).randbytes(1000)

# Written down here once more: what other versions of this code have stored must stay readable, or be refused.
FIELDS = {
    "magic": (0, 4, "not a KV block"),
    "version": (4, 8, "of version"),
    "layout": (8, 40, "another model or layout"),
    "block": (40, 72, "another block"),
    "length": (72, 80, "its header says"),
    "checksum": (80, 84, "checksum is wrong"),
    "payload": (84, 1084, "checksum is wrong"),
}


def test_what_was_packed_comes_back() -> None:
    for payload in (PAYLOAD, b"\0" * 64, b""):
        value = pack(LAYOUT, BLOCK, payload)
        assert len(value) == HEADER_BYTES + len(payload)
        assert unpack(LAYOUT, BLOCK, len(payload), value) == payload


def test_golden_bytes() -> None:
    """Two versions of the code meet in one Redis: the layout is a contract."""
    value = pack("a", bytes(range(32)), b"123456789")
    # Sums by coreutils sha256sum of "a", and the well-known CRC-32 of "123456789": 0xCBF43926.
    layout = "ca978112ca1bbdcafac231b39a23dc4da786eff8147c4e72b9807785afee48bb"
    assert value.hex() == (
        "4f524b56" + "01000000" + layout + bytes(range(32)).hex() + "0900000000000000" + "2639f4cb" + b"123456789".hex()
    )


@pytest.mark.parametrize("field", FIELDS)
def test_any_changed_bit_is_refused(field: str) -> None:
    begin, end, said = FIELDS[field]
    value = pack(LAYOUT, BLOCK, PAYLOAD)
    for position in range(begin, end):
        for bit in range(8):
            changed = bytearray(value)
            changed[position] ^= 1 << bit
            with pytest.raises(CorruptPayload, match=said):
                unpack(LAYOUT, BLOCK, len(PAYLOAD), bytes(changed))


def test_the_fields_are_the_whole_value() -> None:
    begins, ends, _ = zip(*FIELDS.values(), strict=True)
    assert begins == (0, *ends[:-1])
    assert ends[-1] == len(pack(LAYOUT, BLOCK, PAYLOAD))
    assert begins[-1] == HEADER_BYTES


def test_truncated_and_lengthened_are_refused() -> None:
    value = pack(LAYOUT, BLOCK, PAYLOAD)
    for length in range(len(value)):
        with pytest.raises(CorruptPayload, match="less than a header" if length < HEADER_BYTES else "it has"):
            unpack(LAYOUT, BLOCK, len(PAYLOAD), value[:length])
    with pytest.raises(CorruptPayload, match="it has 1001 bytes, not 1000"):
        unpack(LAYOUT, BLOCK, len(PAYLOAD), value + b"\0")


def test_sound_values_of_others_are_refused() -> None:
    with pytest.raises(CorruptPayload, match="another model or layout"):
        unpack(LAYOUT, BLOCK, len(PAYLOAD), pack("layout-b", BLOCK, PAYLOAD))
    with pytest.raises(CorruptPayload, match="another block"):
        unpack(LAYOUT, BLOCK, len(PAYLOAD), pack(LAYOUT, hashlib.sha256(b"other").digest(), PAYLOAD))
    with pytest.raises(CorruptPayload, match="its header says 500 bytes, not 1000"):
        unpack(LAYOUT, BLOCK, len(PAYLOAD), pack(LAYOUT, BLOCK, PAYLOAD[:500]))


def test_random_bytes_are_refused() -> None:
    generator = random.Random(2)
    header = pack(LAYOUT, BLOCK, PAYLOAD)[:HEADER_BYTES]
    for _ in range(2000):
        with pytest.raises(CorruptPayload):
            unpack(LAYOUT, BLOCK, len(PAYLOAD), generator.randbytes(generator.randrange(2000)))
        # Behind a good header too.
        with pytest.raises(CorruptPayload):
            unpack(LAYOUT, BLOCK, len(PAYLOAD), header + generator.randbytes(generator.choice([999, 1000, 1001])))


def test_wrong_block_hash_is_not_packed() -> None:
    with pytest.raises(ValueError, match="block_hash has 5 bytes, not 32"):
        pack(LAYOUT, b"short", PAYLOAD)
