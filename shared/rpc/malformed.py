"""What is wrong with a request that protobuf cannot parse, or should not be asked to.

Its own error does not name the field. To name it takes a walk over the request in Python, about a microsecond a
field, which is given up above a small size; and small fields take far more memory and time to parse than bytes on
the wire (a hundredfold in a message of empty ones), so a large request may not be made of them.
"""

from __future__ import annotations

from typing import Final

from google.protobuf import descriptor_pool
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet

from shared.rpc.errors import InvalidArgument
from shared.rpc.wire import count_fields

MAX_SEARCHED_BYTES: Final = 64 * 1024
"""Longest request whose wrong field is looked for."""
MAX_FIELDS: Final = 16 * 1024
"""Most fields in a request, those of the messages in it included."""
MAX_STREAM_FIELDS: Final = 256 * 1024
"""Most fields in a message of a stream, in which routers gather what they have for many sequences."""

_LENGTH_DELIMITED = 2


def malformed_request(method: str, payload: bytes) -> InvalidArgument:
    """The error for a `payload` that is no request of `method` ("/package.Service/Method").

    Names the first string field that is not UTF-8; if the bytes are no protobuf at all, or more than
    MAX_SEARCHED_BYTES, the message.
    """
    message_type = _request_type(method)
    found = _invalid_utf8(payload, message_type, "") if len(payload) <= MAX_SEARCHED_BYTES else None
    if found is not None:
        path, value = found
        return InvalidArgument(path, value, "valid UTF-8")
    return InvalidArgument("request", payload, f"a well-formed {message_type.full_name} message")


def check_fields(method: str, payload: bytes, limit: int = MAX_FIELDS) -> None:
    """Raises InvalidArgument for a request of `method` with more than `limit` fields, before it is parsed."""
    if count_fields(payload, _request_type(method), limit) > limit:
        raise InvalidArgument(
            "request", f"{len(payload)} bytes in more than {limit} fields", f"of at most {limit} fields"
        )


def _request_type(method: str) -> Descriptor:
    return descriptor_pool.Default().FindMethodByName(method.removeprefix("/").replace("/", ".")).input_type


def _invalid_utf8(payload: bytes, message_type: Descriptor, path: str) -> tuple[str, bytes] | None:
    """Path and bytes of the first string field that is not UTF-8; None if there is none, or no wire format either."""
    try:
        # To a message without fields every field is unknown, and is kept as it came.
        unknown_fields = UnknownFieldSet(Empty.FromString(payload))
    except DecodeError:
        return None
    counts: dict[str, int] = {}
    for position in range(len(unknown_fields)):
        unknown = unknown_fields[position]
        field = message_type.fields_by_number.get(unknown.field_number)
        if field is None or unknown.wire_type != _LENGTH_DELIMITED:
            continue
        index = counts.get(field.name, 0)
        counts[field.name] = index + 1
        field_path = path + (f"{field.name}[{index}]" if field.is_repeated else field.name)
        if field.type == FieldDescriptor.TYPE_STRING:
            try:
                unknown.data.decode()
            except UnicodeDecodeError:
                return field_path, unknown.data
        elif field.message_type is not None:
            found = _invalid_utf8(unknown.data, field.message_type, field_path + ".")
            if found is not None:
                return found
    return None
