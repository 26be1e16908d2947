"""The public `Inference` service, and the life of the router process."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import grpc
from outrider.v1 import inference_pb2, inference_pb2_grpc

from services.router.admission import Admission
from services.router.fleet import Fleet
from services.router.request import ModelLimits, parse_generate, parse_tokenize
from services.router.session import Session
from services.router.settings import RouterSettings
from services.router.tenants import Tenants
from services.router.tokenizer import TextTokenizer
from services.router.usage import UsageMeter
from shared.engine.tokenizer_fingerprint import tokenizer_fingerprint
from shared.rpc.deadline import remaining
from shared.rpc.errors import DeadlineExceeded, to_status
from shared.rpc.server import RpcServer
from shared.telemetry.attributes import (
    GEN_AI_REQUEST_MAX_TOKENS,
    GEN_AI_REQUEST_MODEL,
    GEN_AI_REQUEST_TEMPERATURE,
    GEN_AI_USAGE_INPUT_TOKENS,
    GEN_AI_USAGE_OUTPUT_TOKENS,
    OPERATION_CHAT,
    OPERATION_TEXT_COMPLETION,
)
from shared.telemetry.logs import configure_logging
from shared.telemetry.metrics import RouterMetrics
from shared.telemetry.tracing import Telemetry, configure

logger = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]
T = TypeVar("T")

# Shorter prompts are tokenized at once; a thread would cost more than it saves.
_SHORT_PROMPT_BYTES = 16 * 1024


class InferenceServicer(inference_pb2_grpc.InferenceServicer):
    """Generate: authenticate, check, admit, then run a `Session`."""

    def __init__(
        self,
        settings: RouterSettings,
        tokenizer: TextTokenizer,
        fleet: Fleet,
        tenants: Tenants,
        telemetry: Telemetry,
    ) -> None:
        self.admission = Admission(settings.max_running, settings.max_waiting)
        self._settings = settings
        self._tokenizer = tokenizer
        self._fleet = fleet
        self._tenants = tenants
        self._telemetry = telemetry
        self._metrics = RouterMetrics(telemetry.meter, settings.tokenizer)

    # A coroutine that writes, not a generator: it is cancelled with its RPC wherever it is.
    async def Generate(  # type: ignore[override]
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> None:
        chat = request.WhichOneof("prompt") == "chat"
        usage = UsageMeter(self._metrics, OPERATION_CHAT if chat else OPERATION_TEXT_COMPLETION)
        limit = remaining(context)
        error_type: str | None = "CANCELLED"
        try:
            async with asyncio.timeout(limit):
                await self._generate(request, context, usage)
            error_type = None
        except TimeoutError as error:
            error_type = "DEADLINE_EXCEEDED"
            raise DeadlineExceeded(f"the deadline of {limit:.3f} s is over") from error
        except Exception as error:
            error_type = to_status(error).code.name
            raise
        finally:
            usage.finished(error_type)

    async def _generate(self, request: inference_pb2.GenerateRequest, context: Context, usage: UsageMeter) -> None:
        cache_salt = self._tenants.cache_salt(self._authenticate(context))
        limits = self._limits()
        with self._telemetry.span("tokenize"):
            options = await _tokenizing(request, lambda: parse_generate(request, self._tokenizer, limits))
        async with self.admission.slot(context.peer(), None):
            usage.admitted(len(options.prompt_ids))
            session = Session(
                options,
                self._fleet,
                self._tokenizer,
                usage,
                self._telemetry,
                cache_salt,
                self._settings.failover_seconds,
            )
            with self._telemetry.span(
                "generate",
                attributes={
                    GEN_AI_REQUEST_MODEL: self._fleet.model.model,
                    GEN_AI_REQUEST_MAX_TOKENS: options.params[0].max_tokens,
                    GEN_AI_REQUEST_TEMPERATURE: options.params[0].temperature,
                    GEN_AI_USAGE_INPUT_TOKENS: len(options.prompt_ids),
                },
            ) as span:
                await session.run(context.write)
                span.set_attribute(GEN_AI_USAGE_OUTPUT_TOKENS, usage.to_proto().output_tokens)

    async def Tokenize(
        self, request: inference_pb2.TokenizeRequest, context: Context
    ) -> inference_pb2.TokenizeResponse:
        self._authenticate(context)
        limits = self._limits()
        token_ids = await _tokenizing(request, lambda: parse_tokenize(request, self._tokenizer, limits))
        return inference_pb2.TokenizeResponse(token_ids=token_ids)

    async def GetModelInfo(
        self, request: inference_pb2.GetModelInfoRequest, context: Context
    ) -> inference_pb2.GetModelInfoResponse:
        self._authenticate(context)
        model, draft = self._fleet.model, self._fleet.draft
        return inference_pb2.GetModelInfoResponse(
            model=model.model,
            draft_model=draft.info.model if draft is not None and draft.info is not None else "",
            vocab_size=model.vocab_size,
            max_context=model.max_context,
            eos_token_ids=model.eos_token_ids,
            block_size=model.block_size,
            has_chat_template=self._tokenizer.has_chat_template,
        )

    def _authenticate(self, context: Context) -> str:
        return self._tenants.authenticate(tuple(context.invocation_metadata() or ()))

    def _limits(self) -> ModelLimits:
        model = self._fleet.model
        return ModelLimits(
            vocab_size=model.vocab_size,
            max_context=model.max_context,
            eos_token_ids=frozenset(model.eos_token_ids),
            max_prompt_bytes=self._settings.max_prompt_bytes,
        )


async def _tokenizing(
    request: inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest, parse: Callable[[], T]
) -> T:
    if request.ByteSize() <= _SHORT_PROMPT_BYTES:
        return parse()
    return await asyncio.to_thread(parse)


async def serve(settings: RouterSettings) -> None:
    """Runs the router until it is drained.

    Health is SERVING while a target worker can be reached. Raises StartupError if the workers it finds do
    not fit together.
    """
    configure_logging("router", settings.log_level)
    telemetry = configure("outrider-router", settings.otlp_endpoint)
    tokenizer = await asyncio.to_thread(TextTokenizer.load, settings.tokenizer)
    secret = settings.cache_secret.get_secret_value().encode() if settings.cache_secret else secrets.token_bytes(32)
    tenants = Tenants({key.get_secret_value(): tenant for tenant, key in settings.api_keys.items()}, secret)
    fleet = Fleet(
        settings.targets,
        settings.draft,
        tokenizer_fingerprint(settings.tokenizer),
        settings.max_num_draft_tokens,
        settings.redis_url,
    )
    servicer = InferenceServicer(settings, tokenizer, fleet, tenants, telemetry)
    server = RpcServer(f"{settings.host}:{settings.port}", telemetry)
    server.add("outrider.v1.Inference", inference_pb2_grpc.add_InferenceServicer_to_server, servicer)
    await server.start()
    fleet.start()
    health = asyncio.create_task(_report_health(fleet, server))
    serving = asyncio.create_task(server.serve(servicer.admission.drain, settings.drain_seconds))
    try:
        await asyncio.wait([serving, fleet.failed], return_when=asyncio.FIRST_COMPLETED)
        if fleet.failed.done():
            fleet.failed.result()
        await serving
    finally:
        for task in (health, serving):
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        await server.stop()
        await fleet.close()
        telemetry.shutdown()


async def _report_health(fleet: Fleet, server: RpcServer) -> None:
    """Keeps health at whether a target worker can be reached."""
    while True:
        async with fleet.changed:
            await fleet.changed.wait_for(lambda: fleet.usable)
        await server.set_serving(True)
        async with fleet.changed:
            await fleet.changed.wait_for(lambda: not fleet.usable)
        await server.set_serving(False)
