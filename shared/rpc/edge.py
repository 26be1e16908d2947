"""What stands between grpc and a service's handlers: spans, errors to statuses, and the drain's count."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import DecodeError
from opentelemetry.context import Context
from opentelemetry.trace import SpanKind
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from shared.rpc.errors import Unavailable, to_status
from shared.rpc.malformed import malformed_request
from shared.telemetry.attributes import RPC_METHOD, RPC_RESPONSE_STATUS_CODE, RPC_SYSTEM_NAME
from shared.telemetry.tracing import Telemetry

logger = logging.getLogger(__name__)

_ServicerContext: TypeAlias = grpc.aio.ServicerContext[Any, Any]
_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
# Request (or request iterator) and context in; the response out, or None from one that writes a stream.
_Behavior: TypeAlias = Callable[[Any, _ServicerContext], Awaitable[Any]]

# Health and reflection: neither traced nor refused nor waited for.
_INFRASTRUCTURE = "/grpc."

_propagator = TraceContextTextMapPropagator()


class Edge(grpc.aio.ServerInterceptor):
    """Wraps every handler of our own services; they must be coroutine or async generator functions.

    - A span for each RPC, child of the caller's W3C context. Not for bidirectional streams: they
      carry many requests and live for hours, so their messages have a trace context each.
    - An exception becomes a status (`shared.rpc.errors`), and with INTERNAL a logged traceback. A
      request that cannot be decoded is INVALID_ARGUMENT.
    - A streaming handler written as a generator is closed when its RPC ends, however it ends. (grpc
      leaves it to the garbage collector.)
    - After `refuse()`, new RPCs get UNAVAILABLE; `idle` is set while none is running.
    """

    def __init__(self, telemetry: Telemetry) -> None:
        self.idle = asyncio.Event()
        self.idle.set()
        self.num_active = 0
        self._telemetry = telemetry
        self._refusing = False
        self._wrapped: dict[str, _Handler] = {}

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
        if handler is None or method.startswith(_INFRASTRUCTURE):
            return handler
        if method not in self._wrapped:
            self._wrapped[method] = self._wrap(method, handler)
        return self._wrapped[method]

    def _wrap(self, method: str, handler: _Handler) -> _Handler:
        # A bidirectional stream is not one request.
        traced = not (handler.request_streaming and handler.response_streaming)
        behavior = _behavior(handler)
        deserializer = handler.request_deserializer

        async def guarded(request: Any, context: _ServicerContext) -> Any:
            self._started(context)
            try:
                if self._refusing:
                    raise Unavailable("the server is draining")
                if not handler.request_streaming:
                    request = _decode(method, deserializer, request)
                if not traced:
                    return await _call(method, behavior, request, context)
                with self._span(method, context) as span:
                    code = grpc.StatusCode.OK
                    try:
                        response = await _call(method, behavior, request, context)
                        code = context.code() or code
                        return response
                    except BaseException as error:
                        code = _code_of(error, context)
                        raise
                    finally:
                        span.set_attribute(RPC_RESPONSE_STATUS_CODE, code.name)
            except (grpc.aio.AbortError, grpc.aio.InternalError):
                # A status that the handler sent itself; a write to a caller who is gone.
                raise
            except Exception as error:
                status = to_status(error)
                await context.abort(status.code, status.message, status.trailing_metadata)

        # grpc answers UNKNOWN when a deserializer raises, so unary requests are decoded in here.
        decode = deserializer if handler.request_streaming else None
        make = _FACTORIES[handler.request_streaming, handler.response_streaming]
        return make(guarded, decode, handler.response_serializer)

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
                await context.write(response)
        finally:
            await responses.aclose()  # type: ignore[attr-defined]

    return write_all


def _decode(method: str, deserializer: Callable[[bytes], Any] | None, request: bytes) -> Any:
    if deserializer is None:
        return request
    try:
        return deserializer(request)
    except DecodeError as error:
        raise malformed_request(method, request) from error


async def _call(method: str, behavior: _Behavior, request: Any, context: _ServicerContext) -> Any:
    """Runs the handler, within its span so that a bug's log line carries the trace id."""
    try:
        return await behavior(request, context)
    except (grpc.aio.AbortError, grpc.aio.InternalError):
        raise
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        # grpc sends no status for it, and the caller would wait for ever.
        failure: Exception = RuntimeError("this RPC was not cancelled, but something it awaited was")
        failure.__cause__ = error
    except Exception as error:
        failure = error
    if to_status(failure).code is grpc.StatusCode.INTERNAL:
        logger.error("%s failed", method, exc_info=failure)
    raise failure


def _code_of(error: BaseException, context: _ServicerContext) -> grpc.StatusCode:
    if isinstance(error, grpc.aio.AbortError):
        return context.code()
    if isinstance(error, asyncio.CancelledError | grpc.aio.InternalError):
        return grpc.StatusCode.CANCELLED
    return to_status(error).code
