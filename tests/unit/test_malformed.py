"""Errors for bytes that are no request."""

from __future__ import annotations

import pytest
from google.protobuf.message import DecodeError
from outrider.v1 import inference_pb2 as pb

from shared.rpc import malformed
from shared.rpc.errors import InvalidArgument
from shared.rpc.malformed import MAX_FIELDS, MAX_SEARCHED_BYTES, check_fields, malformed_request

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


def test_in_a_large_request_the_field_is_not_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    payload = b"\x0a\x01\xff" + pb.GenerateRequest(stop=["x" * MAX_SEARCHED_BYTES]).SerializeToString()
    monkeypatch.setattr(malformed, "_invalid_utf8", lambda *_: pytest.fail("searched"))
    error = malformed_request(_GENERATE, payload)
    assert error.field == "request"
    assert f"({len(payload)} bytes)" in str(error)


def test_a_request_may_have_as_many_fields_as_its_limits_need_and_no_more() -> None:
    largest = pb.GenerateRequest(
        chat=pb.Chat(messages=[pb.ChatMessage(role="user", content="x")] * 4096),
        logit_bias=dict.fromkeys(range(1024), 1.0),
        stop=["x"] * 16,
        stop_token_ids=range(64),
        speculation=pb.Speculation(enabled=True, num_draft_tokens=1),
    )
    check_fields(_GENERATE, largest.SerializeToString())
    check_fields(_GENERATE, b"\x72\x00" * MAX_FIELDS)
    with pytest.raises(InvalidArgument, match=rf"^request is .* must be of at most {MAX_FIELDS} fields"):
        check_fields(_GENERATE, b"\x72\x00" * (MAX_FIELDS + 1))
