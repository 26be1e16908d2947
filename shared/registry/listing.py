"""What a worker says of itself to those who look for workers."""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import dataclass
from typing import Final, Literal, Self

MAX_LISTING_BYTES: Final = 4096

_ROLES = {"target": ("both", "prefill", "decode"), "draft": ("",)}
_INSTANCE_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
# A name or IPv4 address, or an IPv6 address in brackets: nothing that gRPC would take for a path.
_ADDRESS = re.compile(r"(?:[A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}(?:%[A-Za-z0-9._-]{1,15})?\]):([0-9]{1,5})")


@dataclass(frozen=True)
class Listing:
    """One worker process. Any that exists is well-formed: the constructor raises ValueError if it would not be."""

    kind: Literal["target", "draft"]
    # New at every process start.
    instance_id: str
    # host:port of its gRPC server, as others reach it.
    address: str
    # What a target does with a prompt; "" of a draft.
    role: Literal["both", "prefill", "decode", ""]

    def __post_init__(self) -> None:
        if self.kind not in _ROLES:
            raise ValueError(f"kind {self.kind!r:.80} is neither 'target' nor 'draft'")
        if self.role not in _ROLES[self.kind]:
            raise ValueError(f"role {self.role!r:.80} of a {self.kind} is none of {_ROLES[self.kind]}")
        if not _INSTANCE_ID.fullmatch(self.instance_id):
            raise ValueError(f"instance_id {self.instance_id!r:.80} is not 1 to 128 letters, digits, '.', '_' and '-'")
        address = _ADDRESS.fullmatch(self.address)
        if address is None or not 0 < int(address[1]) < 65536:
            raise ValueError(f"address {self.address!r:.80} is not host:port, with a port from 1 to 65535")

    def encode(self) -> bytes:
        """The listing as JSON: an object of its fields, in UTF-8."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True).encode()

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """The listing that `data` encodes. Raises ValueError for anything else, and for more than 4 KiB."""
        if len(data) > MAX_LISTING_BYTES:
            raise ValueError(f"more than {MAX_LISTING_BYTES} bytes")
        try:
            fields = json.loads(data.decode())
        except RecursionError:
            raise ValueError("nested too deeply") from None
        names = [field.name for field in dataclasses.fields(cls)]
        if not isinstance(fields, dict) or fields.keys() != set(names):
            raise ValueError(f"not an object of {', '.join(names)}")
        if not all(isinstance(value, str) for value in fields.values()):
            raise ValueError("a field that is not a text")
        return cls(**fields)
