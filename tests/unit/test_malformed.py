"""Errors for bytes that are no request."""

from __future__ import annotations

import pytest
from google.protobuf.message import DecodeError
from outrider.v1 import inference_pb2 as pb

from shared.rpc.malformed import malformed_request

_GENERATE = "/outrider.v1.Inference/Generate"


@pytest.mark.parametrize(
    ("valid", "field"),
    [
        (pb.GenerateRequest(text="one MARK two"), "text"),
        (pb.GenerateRequest(text="é", max_tokens=3, stop=["é", "MARK", "MARK"]), "stop[1]"),
        (
            pb.GenerateRequest(
                logit_bias={3: 1.0},
                chat=pb.Chat(
                    messages=[
                        pb.ChatMessage(role="user", content="hi"),
                        pb.ChatMessage(role="user", content="MARK"),
                    ]
                ),
            ),
            "chat.messages[1].content",
        ),
    ],
)
def test_text_that_is_no_utf8_is_named_by_its_field(valid: pb.GenerateRequest, field: str) -> None:
    payload = valid.SerializeToString().replace(b"MARK", b"\xff\xfe\xfd\xfc")
    with pytest.raises(DecodeError):
        pb.GenerateRequest.FromString(payload)
    error = malformed_request(_GENERATE, payload)
    assert error.field == field
    assert str(error).startswith(f"{field} is b'")
    assert r"\xff\xfe\xfd\xfc" in str(error)
    assert "valid UTF-8" in str(error)


@pytest.mark.parametrize("payload", [b"\xff\xff\xff", b"\x0a\x7fcut off", b"\x1a\x03\x0a\x7fx", b"\xff" * 1_000_000])
def test_bytes_that_are_no_message(payload: bytes) -> None:
    with pytest.raises(DecodeError):
        pb.GenerateRequest.FromString(payload)
    error = malformed_request(_GENERATE, payload)
    assert error.field == "request"
    assert "a well-formed outrider.v1.GenerateRequest message" in str(error)
    assert len(str(error)) < 500
