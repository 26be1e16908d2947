"""Fields counted on the wire, against messages whose fields are known."""

from __future__ import annotations

import random
from typing import Any

import pytest
from outrider.v1 import inference_pb2 as pb

from shared.rpc.wire import count_fields

_GENERATE: Any = pb.GenerateRequest.DESCRIPTOR


@pytest.mark.parametrize(
    ("message", "count"),
    [
        (pb.GenerateRequest(), 0),
        (pb.GenerateRequest(text="x" * 1000), 1),
        (pb.GenerateRequest(text="x", max_tokens=1, temperature=0.5, seed=2**64 - 1), 4),
        (pb.GenerateRequest(stop=[""] * 50), 50),
        # The entry and its two halves.
        (pb.GenerateRequest(logit_bias={1: 0.5, 2: 0.5}), 6),
        (pb.GenerateRequest(token_ids=pb.TokenIds(ids=range(100_000))), 2),
        (pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage(role="a", content="b")] * 3)), 1 + 3 * 3),
    ],
)
def test_fields_of_a_message_and_of_those_in_it(message: pb.GenerateRequest, count: int) -> None:
    assert count_fields(message.SerializeToString(), _GENERATE, 1_000_000) == count


def test_unknown_fields_count() -> None:
    # A varint, a fixed64, a fixed32, bytes that look like a message, and a group with a varint in it.
    unknown = b"\x98\x06\x01" + b"\x99\x06" + b"x" * 8 + b"\x9d\x06" + b"x" * 4 + b"\x9a\x06\x02\x08\x01"
    group = b"\x9b\x06\x98\x06\x01\x9c\x06"
    assert count_fields(unknown, _GENERATE, 100) == 4
    assert count_fields(unknown + group, _GENERATE, 100) == 7


class _Watched(bytes):
    """Bytes that know how far they have been read."""

    furthest = 0

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        self.furthest = max(self.furthest, index)
        return super().__getitem__(index)


@pytest.mark.parametrize("piece", [b"\x72\x00", b"\x98\x06\x01", b"\x9b\x06", b"\x1a\x00"])
def test_no_more_is_read_than_the_limit_asks_for(piece: bytes) -> None:
    payload = _Watched(piece * 1_000_000)
    assert count_fields(payload, _GENERATE, 1000) == 1001
    assert payload.furthest < 1001 * len(piece)


def test_any_bytes_have_a_count() -> None:
    rng = random.Random(0)
    valid = pb.GenerateRequest(
        text="text", stop=["a", "b"], logit_bias={1: 1.0}, chat=pb.Chat(messages=[pb.ChatMessage(role="r")])
    ).SerializeToString()
    for _ in range(3000):
        payload = bytearray(valid)
        for _ in range(rng.randint(1, 4)):
            payload[rng.randrange(len(payload))] = rng.randrange(256)
        assert 0 <= count_fields(bytes(payload[: rng.randint(0, len(payload))]), _GENERATE, 100) <= 101
    assert count_fields(b"\xff" * 1000, _GENERATE, 100) == 0
