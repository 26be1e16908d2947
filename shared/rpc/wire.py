"""The protobuf wire format, as far as it must be understood before a message is parsed."""

from __future__ import annotations

from google.protobuf.descriptor import Descriptor

_VARINT, _FIXED64, _LENGTH_DELIMITED, _GROUP_START, _GROUP_END, _FIXED32 = range(6)


def count_fields(payload: bytes, message_type: Descriptor, limit: int) -> int:
    """Fields in an encoded `message_type`, those of the messages in it included; at most `limit` + 1 are looked at.

    A packed field counts once, however many values it holds: those are cheap to parse. Bytes that are no such
    message end the count; what is wrong with them is for the parser to say.
    https://protobuf.dev/programming-guides/encoding/
    """
    count, position = 0, 0
    # The messages that `position` is within, innermost last: where each ends, and its type.
    within = [(len(payload), message_type)]
    while within and count <= limit:
        end, message_type = within[-1]
        if position >= end:
            within.pop()
            continue
        try:
            tag, position = _varint(payload, position)
            count += 1
            wire_type = tag & 7
            if wire_type == _VARINT:
                _, position = _varint(payload, position)
            elif wire_type == _FIXED64:
                position += 8
            elif wire_type == _FIXED32:
                position += 4
            elif wire_type == _LENGTH_DELIMITED:
                length, position = _varint(payload, position)
                if position + length > end:
                    return count
                field = message_type.fields_by_number.get(tag >> 3)
                if field is not None and field.message_type is not None:
                    within.append((position + length, field.message_type))
                else:
                    position += length
            elif wire_type not in (_GROUP_START, _GROUP_END):
                return count
        except IndexError:
            return count
    return count


def _varint(payload: bytes, position: int) -> tuple[int, int]:
    """The varint at `position`, of at most 10 bytes, and where it ends. Raises IndexError if it does not end."""
    value = 0
    for shift in range(0, 70, 7):
        byte = payload[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise IndexError("a varint of more than 10 bytes")
