"""What the bytes of a block mean: two workers exchange blocks only if all of it agrees."""

from __future__ import annotations

from outrider.v1 import transfer_pb2

from shared.rpc.errors import FailedPrecondition


def check_layout(theirs: transfer_pb2.BlockLayout, ours: transfer_pb2.BlockLayout) -> None:
    """Raises FailedPrecondition, with both values of what differs."""
    for name in ("model", "dtype", "block_size", "block_bytes", "fingerprint"):
        wanted, held = getattr(theirs, name), getattr(ours, name)
        if wanted != held:
            raise FailedPrecondition(f"blocks here are of {name} {held!r}, not {wanted!r} as asked for")
