"""What goes over a worker's stream, gathered into messages well below what a connection takes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, TypeVar

from google.protobuf.message import Message

M = TypeVar("M", bound=Message)

# A message is sent and read whole, and one above `MAX_MESSAGE_BYTES` ends the stream with all its sequences.
BUNDLE_BYTES: Final = 4 * 1024 * 1024


def bundles(messages: Iterable[M]) -> Iterator[list[M]]:
    """Cuts `messages` into runs of at most BUNDLE_BYTES, in order; one that is larger has a run of its own."""
    bundle: list[M] = []
    num_bytes = 0
    for message in messages:
        size = message.ByteSize()
        if bundle and num_bytes + size > BUNDLE_BYTES:
            yield bundle
            bundle, num_bytes = [], 0
        bundle.append(message)
        num_bytes += size
    if bundle:
        yield bundle
