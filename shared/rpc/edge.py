"""What stands between grpc and a service's handlers: authentication, decoding, spans, errors to statuses, the drain."""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import suppress
from contextvars import ContextVar
from typing import Any, Final, TypeAlias

import grpc
from google.protobuf.message import DecodeError
from opentelemetry.context import Context
from opentelemetry.trace import SpanKind
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from shared.rpc.errors import (
    Aborted,
    InvalidArgument,
    OutriderError,
    ResourceExhausted,
    RpcStatus,
    Unavailable,
    to_status,
)
from shared.rpc.malformed import MAX_STREAM_FIELDS, check_fields, malformed_request
from shared.telemetry.attributes import RPC_METHOD, RPC_RESPONSE_STATUS_CODE, RPC_SYSTEM_NAME
from shared.telemetry.tracing import Telemetry

logger = logging.getLogger(__name__)

_ServicerContext: TypeAlias = grpc.aio.ServicerContext[Any, Any]
_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
# Request (or request iterator) and context in; the response out, or None from one that writes a stream.
_Behavior: TypeAlias = Callable[[Any, _ServicerContext], Awaitable[Any]]
Authenticate: TypeAlias = Callable[[Iterable[tuple[str, str | bytes]]], object]
"""Raises an OutriderError for a call whose metadata does not let it in."""
CheckCaller: TypeAlias = Callable[[_ServicerContext], object]
"""Raises an OutriderError for a call whose caller may not make it."""

request_bytes: Final[ContextVar[int]] = ContextVar("request_bytes")
"""Length on the wire of the request being handled; of a stream of requests it is not set."""

# Health and reflection: neither traced nor refused nor waited for, and open to anyone.
_INFRASTRUCTURE = "/grpc."
# Names of services and symbols are all that is asked for.
_MAX_INFRASTRUCTURE_BYTES = 4 * 1024
_MAX_INFRASTRUCTURE_STREAMS = 256
# Decoded at once; a larger request is worth a thread, since protobuf takes up to 0.2 µs a byte.
_INLINE_BYTES = 16 * 1024
# Large requests that may wait for their decoding; each is held in memory meanwhile.
_MAX_DECODING = 64
# A caller that reads nothing keeps its status from being sent; its RPC ends all the same.
_STATUS_SECONDS = 5.0
# One that is still connected, but reads nothing for so long, hangs, and what it holds here is wanted by others.
_WRITE_SECONDS = 60.0

_DURATION_BUCKETS: Final = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0]

_propagator = TraceContextTextMapPropagator()


class Edge(grpc.aio.ServerInterceptor):
    """Wraps every handler of our own services; they must be coroutine or async generator functions.

    - `authenticate`, if there is one, sees a call's metadata before a byte of its request is read; `check_caller`
      sees the connection as well, before the handler is called.
    - A request is decoded off the event loop unless it is small, and refused if it is made of too many
      fields. One that cannot be decoded is INVALID_ARGUMENT.
    - A span for each RPC, child of the caller's W3C context. Not for bidirectional streams: they
      carry many requests and live for hours, so their messages have a trace context each.
    - An exception becomes a status (`shared.rpc.errors`), and with INTERNAL a logged traceback.
    - A streaming handler written as a generator is closed when its RPC ends, however it ends. (grpc
      leaves it to the garbage collector.)
    - After `refuse()`, new RPCs get UNAVAILABLE; `idle` is set while none is running.

    Health and reflection are open to anyone, and so bounded in the size of requests and in the number of streams.
    """

    def __init__(
        self, telemetry: Telemetry, authenticate: Authenticate | None = None, check_caller: CheckCaller | None = None
    ) -> None:
        self.idle = asyncio.Event()
        self.idle.set()
        self.num_active = 0
        self._telemetry = telemetry
        self._duration = telemetry.meter.create_histogram(
            "rpc.server.call.duration",
            unit="s",
            description="From an RPC's arrival to its end; not of bidirectional streams, which live for hours.",
            explicit_bucket_boundaries_advisory=_DURATION_BUCKETS,
        )
        self._authenticate = authenticate
        self._check_caller = check_caller
        self._refusing = False
        self._never_refused: list[str] = []
        self._wrapped: dict[str, _Handler] = {}
        self._num_infrastructure_streams = 0
        self._num_decoding = 0
        # One at a time: threads that decode share the interpreter with the event loop.
        self._decoder = asyncio.Semaphore(1)

    def never_refuse(self, service: str) -> None:
        """New RPCs of this service (its full name) are taken in any case."""
        self._never_refused.append(f"/{service}/")

    def refuse(self) -> None:
        """Answer new RPCs with UNAVAILABLE from now on."""
        self._refusing = True

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler | None:
        method = handler_call_details.method
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        infrastructure = method.startswith(_INFRASTRUCTURE)
        if self._authenticate is not None and not infrastructure:
            try:
                self._authenticate(tuple(handler_call_details.invocation_metadata or ()))
            except OutriderError as error:
                return self._refusal(method, error)
        if method not in self._wrapped:
            self._wrapped[method] = self._bounded(handler) if infrastructure else self._wrap(method, handler)
        return self._wrapped[method]

    def _refusal(self, method: str, error: OutriderError) -> _Handler:
        async def refuse(_: Any, __: _ServicerContext) -> None:
            raise error

        # As a stream, whatever the method is: of a single request grpc would read all before it calls the handler.
        return grpc.stream_stream_rpc_method_handler(self._guarded(method, refuse, traced=True))

    def _bounded(self, handler: _Handler) -> _Handler:
        behavior, deserializer = _behavior(handler), handler.request_deserializer
        assert deserializer is not None

        def decode(payload: bytes) -> Any:
            if len(payload) > _MAX_INFRASTRUCTURE_BYTES:
                raise InvalidArgument("request", f"{len(payload)} bytes", f"at most {_MAX_INFRASTRUCTURE_BYTES} bytes")
            try:
                return deserializer(payload)
            except DecodeError as error:
                raise InvalidArgument("request", payload, "a well-formed message") from error

        async def decode_each(payloads: AsyncIterator[bytes]) -> AsyncIterator[Any]:
            async for payload in payloads:
                yield decode(payload)

        async def bounded(request: Any, context: _ServicerContext) -> Any:
            # A single answer is given at once, and to a probe of health always: streams alone stay.
            num_streams = int(handler.response_streaming)
            self._num_infrastructure_streams += num_streams
            try:
                if num_streams and self._num_infrastructure_streams > _MAX_INFRASTRUCTURE_STREAMS:
                    raise ResourceExhausted(
                        f"more than {_MAX_INFRASTRUCTURE_STREAMS} streams of health and reflection", 1.0
                    )
                decoded = decode_each(request) if handler.request_streaming else decode(request)
                return await behavior(decoded, context)
            except OutriderError as error:
                status = to_status(error)
            finally:
                self._num_infrastructure_streams -= num_streams
            return await _abort(context, status)

        return _FACTORIES[handler.request_streaming, handler.response_streaming](
            bounded, None, handler.response_serializer
        )

    def _wrap(self, method: str, handler: _Handler) -> _Handler:
        behavior, deserializer = _behavior(handler), handler.request_deserializer

        async def decoded(payload: bytes, context: _ServicerContext) -> Any:
            request_bytes.set(len(payload))
            return await behavior(await self._decode(method, deserializer, payload), context)

        async def decoded_each(payloads: AsyncIterator[bytes], context: _ServicerContext) -> Any:
            return await behavior(_decode_each(method, deserializer, payloads), context)

        # A bidirectional stream is not one request.
        traced = not (handler.request_streaming and handler.response_streaming)
        guarded = self._guarded(method, decoded_each if handler.request_streaming else decoded, traced=traced)
        # grpc answers UNKNOWN when a deserializer raises, so requests are decoded in here.
        make = _FACTORIES[handler.request_streaming, handler.response_streaming]
        return make(guarded, None, handler.response_serializer)

    def _guarded(self, method: str, behavior: _Behavior, *, traced: bool) -> _Behavior:
        async def guarded(request: Any, context: _ServicerContext) -> Any:
            self._started(context)
            try:
                if not traced:
                    self._let_in(method, context)
                    return await _call(method, behavior, request, context)
                began = time.monotonic()
                with self._span(method, context) as span:
                    code = grpc.StatusCode.OK
                    try:
                        self._let_in(method, context)
                        response = await _call(method, behavior, request, context)
                        code = context.code() or code
                        return response
                    except BaseException as error:
                        code = _code_of(error, context)
                        raise
                    finally:
                        span.set_attribute(RPC_RESPONSE_STATUS_CODE, code.name)
                        self._duration.record(time.monotonic() - began, _attributes(method, code))
            except (grpc.aio.AbortError, grpc.aio.InternalError):
                # A status that the handler sent itself; one that is gone.
                raise
            except Exception as error:
                status = to_status(error)
            # Out here the error and its frames are gone, with all that they held, however long the status takes.
            return await _abort(context, status)

        return guarded

    def _let_in(self, method: str, context: _ServicerContext) -> None:
        """Raises an OutriderError if the call is not to be made, or not now."""
        if self._check_caller is not None:
            self._check_caller(context)
        if self._refusing and not method.startswith(tuple(self._never_refused)):
            raise Unavailable("the server is draining")

    async def _decode(self, method: str, deserializer: Callable[[bytes], Any] | None, payload: bytes) -> Any:
        if deserializer is None:
            return payload
        try:
            if len(payload) <= _INLINE_BYTES:
                return deserializer(payload)
            if self._num_decoding >= _MAX_DECODING:
                raise ResourceExhausted(f"{self._num_decoding} large requests are being decoded", 1.0)
            self._num_decoding += 1
            try:
                async with self._decoder:
                    await asyncio.to_thread(check_fields, method, payload)
                    return await asyncio.to_thread(deserializer, payload)
            finally:
                self._num_decoding -= 1
        except DecodeError as error:
            raise await asyncio.to_thread(malformed_request, method, payload) from error

    def _span(self, method: str, context: _ServicerContext) -> Any:
        metadata = context.invocation_metadata() or ()
        carrier = {key: value for key, value in metadata if isinstance(value, str)}
        return self._telemetry.span(
            method.removeprefix("/"),
            parent=_propagator.extract(carrier, Context()),
            kind=SpanKind.SERVER,
            attributes={RPC_SYSTEM_NAME: "grpc", RPC_METHOD: method.removeprefix("/")},
        )

    def _started(self, context: _ServicerContext) -> None:
        self.num_active += 1
        self.idle.clear()
        # Not when the handler returns: its status has yet to be sent then.
        context.add_done_callback(self._finished)  # type: ignore[arg-type]

    def _finished(self, _: _ServicerContext) -> None:
        self.num_active -= 1
        if self.num_active == 0:
            self.idle.set()


_FACTORIES: dict[tuple[bool, bool], Callable[..., _Handler]] = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}


async def _decode_each(
    method: str, deserializer: Callable[[bytes], Any] | None, payloads: AsyncIterator[bytes]
) -> AsyncIterator[Any]:
    """The messages of a stream of requests. Raises InvalidArgument for one that is none."""
    assert deserializer is not None
    async for payload in payloads:
        # Two bytes a field at least: a shorter one cannot have too many.
        if len(payload) > 2 * MAX_STREAM_FIELDS:
            await asyncio.to_thread(check_fields, method, payload, MAX_STREAM_FIELDS)
        try:
            message = deserializer(payload)
        except DecodeError as error:
            raise await asyncio.to_thread(malformed_request, method, payload) from error
        yield message


def _behavior(handler: _Handler) -> _Behavior:
    """The handler's function, as a coroutine function also where it is an async generator."""
    function: Any = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
    if not inspect.isasyncgenfunction(function):
        return function  # type: ignore[no-any-return]

    async def write_all(request: Any, context: _ServicerContext) -> None:
        # The generator would learn of a cancellation only where it awaits, not where it yields. Writing
        # here, inside the RPC's task, it is closed in both cases.
        responses: AsyncIterator[Any] = function(request, context)
        try:
            async for response in responses:
                await _write(context, response)
        finally:
            await responses.aclose()  # type: ignore[attr-defined]

    return write_all


class _CallerGone(asyncio.CancelledError):
    """Of an RPC that is cancelled, though its task has not been told yet."""


async def _write(context: _ServicerContext, response: Any) -> None:
    """Raises Aborted if the caller reads too little for it to go out in time; CancelledError if it is gone."""
    try:
        async with asyncio.timeout(_WRITE_SECONDS):
            await context.write(response)
    except grpc.aio.InternalError as error:
        # Cancelled, and a write was under way before the task was told.
        raise _CallerGone("the caller is gone") from error
    except TimeoutError as error:
        raise Aborted(f"the caller has read nothing for {_WRITE_SECONDS:g} s") from error


async def _abort(context: _ServicerContext, status: RpcStatus) -> None:
    """Ends the RPC with `status`, which is sent behind what the caller has yet to read."""
    try:
        with suppress(TimeoutError):
            async with asyncio.timeout(_STATUS_SECONDS):
                await context.abort(status.code, status.message, status.trailing_metadata)
    except grpc.aio.InternalError as error:
        # The caller is gone, or the deadline that this tells of cut off the sending of the initial metadata, and
        # it is over for the caller too: there is nobody to tell. As a cancellation grpc takes it for no fault.
        logger.info("status not sent", extra={"code": status.code.name, "reason": str(error)})
        raise _CallerGone from error


async def _call(method: str, behavior: _Behavior, request: Any, context: _ServicerContext) -> Any:
    """Runs the handler, within its span so that a bug's log line carries the trace id."""
    try:
        return await behavior(request, context)
    except (grpc.aio.AbortError, grpc.aio.InternalError):
        raise
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling() or isinstance(error, _CallerGone):
            raise
        # grpc sends no status for it, and the caller would wait for ever.
        failure: Exception = RuntimeError("this RPC was not cancelled, but something it awaited was")
        failure.__cause__ = error
    except Exception as error:
        failure = error
    if to_status(failure).code is grpc.StatusCode.INTERNAL:
        logger.error("%s failed", method, exc_info=failure)
    raise failure


def _attributes(method: str, code: grpc.StatusCode) -> dict[str, AttributeValue]:
    return {
        RPC_SYSTEM_NAME: "grpc",
        RPC_METHOD: method.removeprefix("/"),
        RPC_RESPONSE_STATUS_CODE: code.name,
    }


def _code_of(error: BaseException, context: _ServicerContext) -> grpc.StatusCode:
    if isinstance(error, grpc.aio.AbortError):
        return context.code()
    if isinstance(error, asyncio.CancelledError | grpc.aio.InternalError):
        return grpc.StatusCode.CANCELLED
    return to_status(error).code
