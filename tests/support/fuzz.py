"""Messages as nobody should send them, to every method of the services: each is refused or closed, and nothing is left.

They are good ones with a value or two changed, or made by the descriptors, with values at the edges of what their types
hold; and such messages with bytes changed, cut, doubled or put in, and bytes drawn at random.
"""

from __future__ import annotations

import asyncio
import random
import struct
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import grpc
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2  # type: ignore[import-untyped]
from grpc_reflection.v1alpha import reflection_pb2  # type: ignore[import-untyped]
from outrider.v1 import draft_pb2, inference_pb2, target_pb2, transfer_pb2, worker_pb2

from tests.support import good_messages

CALL_SECONDS: Final = 0.5
STREAM_LENGTHS: Final = (1, 2, 8, 64)
MOST_DEPTH: Final = 4
EXPECTED: Final = {
    "OK",
    "CANCELLED",
    "INVALID_ARGUMENT",
    "DEADLINE_EXCEEDED",
    "NOT_FOUND",
    "FAILED_PRECONDITION",
    "RESOURCE_EXHAUSTED",
    "ABORTED",
    "UNAVAILABLE",
    "CLOSED",
}
"""How an RPC may end that was not meant to go well; what is not here is a bug of ours, INTERNAL and UNKNOWN above all.

CLOSED: the stream was over before all was sent, which grpc tells the sender alone, as an error of its own.
"""

_NUMBERS = (0, 1, 2, 7, 63, 64, 255, 1 << 15, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, (1 << 63) - 1, (1 << 64) - 1)
_FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-45, 1e-7, 3.4e38, float("inf"), float("-inf"), float("nan"))
_TEXTS = ("", "a", "def main():\n", "\x00", "é" * 50, "\U0001f600", "127.0.0.1:1", "unix:/tmp/x", "../..", "a" * 3000)


class Method(NamedTuple):
    """One RPC; `streams`: whether requests do; `seconds`: its deadline; `good` draws a request that may be served."""

    path: str
    request: type[Message]
    streams: bool = False
    seconds: float = CALL_SECONDS
    good: Callable[[random.Random], Message] | None = None


INFRASTRUCTURE: Final = (
    Method("/grpc.health.v1.Health/Check", health_pb2.HealthCheckRequest),
    # It never ends by itself.
    Method("/grpc.health.v1.Health/Watch", health_pb2.HealthCheckRequest, seconds=0.02),
    Method(
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", reflection_pb2.ServerReflectionRequest, True
    ),
)
METHODS: Final[Mapping[str, Sequence[Method]]] = {
    "router": (
        Method("/outrider.v1.Inference/Generate", inference_pb2.GenerateRequest, good=good_messages.generate),
        Method("/outrider.v1.Inference/Tokenize", inference_pb2.TokenizeRequest, good=good_messages.tokenize),
        Method("/outrider.v1.Inference/GetModelInfo", inference_pb2.GetModelInfoRequest),
        *INFRASTRUCTURE,
    ),
    "target": (
        Method("/outrider.v1.Target/Serve", target_pb2.TargetRequest, True, good=good_messages.target),
        Method("/outrider.v1.Target/GetWorkerInfo", worker_pb2.GetWorkerInfoRequest),
        Method("/outrider.v1.Target/GetWorkerState", worker_pb2.GetWorkerStateRequest),
        Method("/outrider.v1.Transfer/Fetch", transfer_pb2.FetchRequest, True, good=good_messages.fetch),
        Method("/outrider.v1.Transfer/Read", transfer_pb2.ReadRequest),
        *INFRASTRUCTURE,
    ),
    "draft": (
        Method("/outrider.v1.Drafter/Serve", draft_pb2.DraftRequest, True, good=good_messages.draft),
        Method("/outrider.v1.Drafter/GetWorkerInfo", worker_pb2.GetWorkerInfoRequest),
        Method("/outrider.v1.Drafter/GetWorkerState", worker_pb2.GetWorkerStateRequest),
        *INFRASTRUCTURE,
    ),
}


class Mutator:
    """Draws messages; the same seed draws the same."""

    def __init__(self, seed: int | str) -> None:
        self._rng = random.Random(seed)

    def messages(self, method: Method, number: int) -> list[bytes]:
        """On the wire. All but the last can be decoded: one that cannot ends its stream."""
        return [self._decodable(method) for _ in range(number - 1)] + [self._any(method)]

    def stream_length(self) -> int:
        return self._rng.choice(STREAM_LENGTHS)

    def _any(self, method: Method) -> bytes:
        rng = self._rng
        if rng.random() < 0.1:
            return rng.randbytes(rng.choice((0, 1, 2, 8, 64, 1024)))
        payload = self._decodable(method)
        return payload if rng.random() < 0.5 else self._mutated(payload)

    def _decodable(self, method: Method) -> bytes:
        rng = self._rng
        if method.good is not None and rng.random() < 0.7:
            made = method.good(rng)
            for _ in range(rng.choice((0, 1, 1, 2))):
                self._change(made)
        else:
            made = method.request()
            self._fill(made, 0)
        return made.SerializeToString()

    def _change(self, message: Message) -> None:
        """One value in it, or of a message in it, becomes another."""
        rng = self._rng
        there = message.ListFields()
        if not there:
            return
        each, value = rng.choice(there)
        # What is too much for its type stays as it was.
        with suppress(ValueError, OverflowError):
            if _is_map(each):
                self._fill_map(message, each)
            elif each.is_repeated:
                place = rng.randrange(len(value))
                if each.message_type is not None:
                    self._change(value[place])
                else:
                    value[place] = self._value(each)
            elif each.message_type is not None:
                self._change(value)
            else:
                setattr(message, each.name, self._value(each))

    def _fill(self, message: Message, depth: int) -> None:
        rng, descriptor = self._rng, message.DESCRIPTOR
        for each in descriptor.fields:
            if rng.random() < 0.4:
                continue
            # What is too much for its type is drawn too seldom to matter, and left out.
            with suppress(ValueError, OverflowError):
                if _is_map(each):
                    self._fill_map(message, each)
                elif each.is_repeated:
                    self._fill_repeated(message, each, depth)
                elif each.message_type is not None:
                    if depth < MOST_DEPTH:
                        part = getattr(message, each.name)
                        part.SetInParent()
                        self._fill(part, depth + 1)
                else:
                    setattr(message, each.name, self._value(each))

    def _fill_map(self, message: Message, map_field: Any) -> None:
        entry = map_field.message_type
        entries: Any = getattr(message, map_field.name)
        for _ in range(self._rng.choice((0, 1, 3))):
            key, value = (self._value(entry.fields_by_name[name]) for name in ("key", "value"))
            entries[key] = value

    def _fill_repeated(self, message: Message, each: Any, depth: int) -> None:
        several: Any = getattr(message, each.name)
        for _ in range(self._rng.choice((0, 1, 2, 5, 40))):
            if each.message_type is None:
                several.append(self._value(each))
            elif depth < MOST_DEPTH:
                self._fill(several.add(), depth + 1)

    def _value(self, each: Any) -> Any:
        rng = self._rng
        match each.cpp_type:
            case FieldDescriptor.CPPTYPE_BOOL:
                return rng.random() < 0.5
            case FieldDescriptor.CPPTYPE_FLOAT | FieldDescriptor.CPPTYPE_DOUBLE:
                return rng.choice(_FLOATS)
            case FieldDescriptor.CPPTYPE_STRING if each.type == FieldDescriptor.TYPE_STRING:
                return rng.choice(_TEXTS)
            case FieldDescriptor.CPPTYPE_STRING:
                return rng.randbytes(rng.choice((0, 1, 16, 32, 200)))
            case FieldDescriptor.CPPTYPE_ENUM:
                return rng.choice((0, 1, 2, 3, 99))
            case _:
                return rng.choice(_NUMBERS) if rng.random() < 0.5 else rng.randrange(300)

    def _mutated(self, payload: bytes) -> bytes:
        rng, changed = self._rng, bytearray(payload)
        for _ in range(rng.choice((1, 1, 2, 8))):
            place = rng.randrange(len(changed) + 1)
            match rng.randrange(6):
                case 0 if changed:
                    changed[min(place, len(changed) - 1)] ^= 1 << rng.randrange(8)
                case 1:
                    del changed[place:]
                case 2:
                    changed[place:place] = rng.randbytes(rng.choice((1, 4, 40)))
                case 3:
                    part = changed[place : place + rng.randrange(40)]
                    changed[place:place] = part * rng.choice((1, 2, 30))
                case 4:
                    # A field that nobody knows, or a known one of another type.
                    changed += _varint(rng.randrange(1, 1 << 29) << 3 | rng.randrange(8)) + rng.randbytes(6)
                case _:
                    changed[place : place + 4] = struct.pack("<I", rng.choice((0, 1, (1 << 32) - 1)))
        return bytes(changed)


@dataclass
class Fuzz:
    """Messages sent to services, and how their RPCs ended: by method and status."""

    seed: int
    statuses: Counter[tuple[str, str]] = field(default_factory=Counter)
    num_messages: int = 0

    @property
    def unexpected(self) -> dict[tuple[str, str], int]:
        return {key: count for key, count in self.statuses.items() if key[1] not in EXPECTED}

    async def run(
        self,
        address: str,
        methods: Sequence[Method],
        num_messages: int,
        connect: Callable[[str], grpc.aio.Channel],
        num_tasks: int = 8,
    ) -> None:
        """Sends so many, to each method its share, several RPCs at a time."""
        share = -(-num_messages // (len(methods) * num_tasks))
        async with connect(address) as channel, asyncio.TaskGroup() as group:
            for method in methods:
                for task in range(num_tasks):
                    mutator = Mutator(f"{self.seed} {method.path} {task}")
                    group.create_task(self._send(channel, method, mutator, share))

    async def _send(self, channel: grpc.aio.Channel, method: Method, mutator: Mutator, number: int) -> None:
        left = number
        while left > 0:
            count = min(left, mutator.stream_length()) if method.streams else 1
            payloads = mutator.messages(method, count)
            status = await (
                _stream(channel, method, payloads) if method.streams else _ask(channel, method, payloads[0])
            )
            self.statuses[method.path, status] += 1
            self.num_messages += count
            left -= count


async def _ask(channel: grpc.aio.Channel, method: Method, payload: bytes) -> str:
    ask: Any = channel.unary_stream(method.path)
    call = ask(payload, timeout=method.seconds)
    try:
        async for _ in call:
            pass
    except grpc.aio.AioRpcError:
        pass
    return str((await call.code()).name)


async def _stream(channel: grpc.aio.Channel, method: Method, payloads: Sequence[bytes]) -> str:
    talk: Any = channel.stream_stream(method.path)
    call = talk(timeout=method.seconds)
    closed = False

    async def write() -> None:
        # It may be over before all is said.
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            for payload in payloads:
                await call.write(payload)
            await call.done_writing()

    writing = asyncio.create_task(write())
    try:
        async for _ in call:
            pass
    except grpc.aio.AioRpcError as error:
        closed = error.details() == "Internal error from Core"
    finally:
        writing.cancel()
        with suppress(asyncio.CancelledError):
            await writing
    return "CLOSED" if closed else str((await call.code()).name)


def _is_map(each: Any) -> bool:
    return each.message_type is not None and bool(each.message_type.GetOptions().map_entry)


def _varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 127:
        encoded.append(number & 127 | 128)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)
