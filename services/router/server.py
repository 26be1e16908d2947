"""The public `Inference` service, and the life of the router process."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final, TypeVar

import grpc
from outrider.v1 import inference_pb2, inference_pb2_grpc

from services.router.clients.admission import Admission
from services.router.clients.quotas import Quotas
from services.router.clients.request import (
    ModelLimits,
    check_generate,
    check_tokenize,
    parse_tokenize,
    tokenize_generate,
)
from services.router.clients.tenants import Tenants
from services.router.clients.usage import UsageMeter
from services.router.generation.session import Session
from services.router.listener import public_credentials
from services.router.settings import RouterSettings
from services.router.text.tokenizer import TextTokenizer
from services.router.text.tokenizer_pool import TokenizerPool
from services.router.workers.fleet import Fleet
from shared.engine.tokenizer_fingerprint import tokenizer_fingerprint
from shared.heap import keep_for_good
from shared.rpc.deadline import remaining
from shared.rpc.edge import request_bytes
from shared.rpc.errors import DeadlineExceeded, to_status
from shared.rpc.server import RpcServer
from shared.security.api_keys import ApiKey, parse_api_keys, unlimited_keys
from shared.security.identity import Identity
from shared.security.watched_files import WatchedFiles
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
from shared.telemetry.service import configure_service
from shared.telemetry.tracing import Telemetry

logger = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]
T = TypeVar("T")

# Shorter requests are checked and tokenized at once; a thread would cost more than it saves.
_SHORT_REQUEST_BYTES: Final = 4 * 1024
# Of the threads that tokenize one is always left to Generate.
_MAX_TOKENIZE_RUNNING: Final = 1


class InferenceServicer(inference_pb2_grpc.InferenceServicer):
    """Generate: check, admit, tokenize, then run a `Session`. Callers were let in by `Tenants` before (`serve`).

    In line, requests stand behind those of their own tenant, or without API keys of their own connection.
    """

    def __init__(
        self,
        settings: RouterSettings,
        tokenizer: TextTokenizer,
        fleet: Fleet,
        tenants: Tenants,
        telemetry: Telemetry,
    ) -> None:
        self.admission = Admission(settings.max_running, settings.max_waiting)
        self._tokenize_admission = Admission(_MAX_TOKENIZE_RUNNING, settings.max_waiting)
        self._tokenizer_pool = TokenizerPool()
        self._settings = settings
        self._tokenizer = tokenizer
        self._fleet = fleet
        self._tenants = tenants
        self._quotas = Quotas()
        self._telemetry = telemetry
        self._metrics = RouterMetrics(telemetry.meter, settings.tokenizer)
        self._metrics.watch_requests(lambda: self.admission.num_running, lambda: self.admission.num_waiting)
        self._metrics.watch_workers(fleet.states)

    # A coroutine that writes, not a generator: it is cancelled with its RPC wherever it is.
    async def Generate(  # type: ignore[override]
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> None:
        chat = request.WhichOneof("prompt") == "chat"
        usage = UsageMeter(self._metrics, OPERATION_CHAT if chat else OPERATION_TEXT_COMPLETION)
        limit = remaining(context)
        error_type: str | None = "CANCELLED"
        try:
            key = self._key(context)
            with self._quotas.request(key) as usage.spend:
                async with asyncio.timeout(limit):
                    await self._generate(request, context, key, usage)
            error_type = None
        except TimeoutError as error:
            error_type = "DEADLINE_EXCEEDED"
            raise DeadlineExceeded(f"the deadline of {limit:.3f} s is over") from error
        except Exception as error:
            error_type = to_status(error).code.name
            raise
        finally:
            usage.finished(error_type)

    async def _generate(
        self, request: inference_pb2.GenerateRequest, context: Context, key: ApiKey, usage: UsageMeter
    ) -> None:
        tenant, limits = key.tenant, self._limits(key)
        checked = await _checked(lambda: check_generate(request, self._tokenizer, limits))
        async with self.admission.slot(tenant or context.peer(), None, checked.num_sequences) as release:
            usage.admitted()
            with self._telemetry.span("tokenize"):
                options = await self._tokenized(lambda: tokenize_generate(checked, self._tokenizer, limits))
            usage.prompt_tokenized(len(options.prompt_ids))
            session = Session(
                options,
                self._fleet,
                self._tokenizer,
                usage,
                self._telemetry,
                self._tenants.cache_salt(tenant),
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
                # By itself, since grpc cannot send a status while the write that would carry it is held up.
                await context.send_initial_metadata(())
                # The places are free again when generation ends, whenever the client reads the last of it.
                await session.run(context.write, release)
                span.set_attribute(GEN_AI_USAGE_OUTPUT_TOKENS, usage.to_proto().output_tokens)

    async def Tokenize(
        self, request: inference_pb2.TokenizeRequest, context: Context
    ) -> inference_pb2.TokenizeResponse:
        key = self._key(context)
        tenant, limits = key.tenant, self._limits(key)
        await _checked(lambda: check_tokenize(request, self._tokenizer, limits))

        def tokenize() -> inference_pb2.TokenizeResponse:
            return inference_pb2.TokenizeResponse(token_ids=parse_tokenize(request, self._tokenizer, limits))

        if _is_short():
            return tokenize()
        async with self._tokenize_admission.slot(tenant or context.peer(), remaining(context)):
            return await self._tokenizer_pool.run(tokenize)

    async def GetModelInfo(
        self, request: inference_pb2.GetModelInfoRequest, context: Context
    ) -> inference_pb2.GetModelInfoResponse:
        self._key(context)
        model = self._fleet.model
        drafts = [link.info.model for link in self._fleet.drafts if link.info is not None]
        return inference_pb2.GetModelInfoResponse(
            model=model.model,
            draft_model=drafts[0] if drafts else "",
            vocab_size=model.vocab_size,
            max_context=model.max_context,
            eos_token_ids=model.eos_token_ids,
            block_size=model.block_size,
            has_chat_template=self._tokenizer.has_chat_template,
            target_drafts_with=self._fleet.targets_draft_with,
        )

    def _key(self, context: Context) -> ApiKey:
        return self._tenants.authenticate(tuple(context.invocation_metadata() or ()))

    def _limits(self, key: ApiKey) -> ModelLimits:
        model = self._fleet.model
        return ModelLimits(
            vocab_size=model.vocab_size,
            max_context=model.max_context,
            eos_token_ids=frozenset(model.eos_token_ids),
            max_prompt_bytes=self._settings.max_prompt_bytes,
            max_tokens=key.max_tokens,
        )

    async def _tokenized(self, tokenize: Callable[[], T]) -> T:
        return tokenize() if _is_short() else await self._tokenizer_pool.run(tokenize)


async def _checked(check: Callable[[], T]) -> T:
    """What `check` returns. Of a large request it walks over thousands of fields, so not on the event loop."""
    return check() if _is_short() else await asyncio.to_thread(check)


def _is_short() -> bool:
    """Whether the request being handled is."""
    return request_bytes.get() <= _SHORT_REQUEST_BYTES


async def serve(settings: RouterSettings) -> None:
    """Runs the router until it is drained.

    Health is SERVING while a target worker can be reached. Raises StartupError if the workers it finds do
    not fit together.
    """
    configure_logging("router", settings.log_level)
    telemetry = configure_service("outrider-router", settings)
    tokenizer = await asyncio.to_thread(TextTokenizer.load, settings.tokenizer)
    secret = settings.cache_secret.get_secret_value().encode() if settings.cache_secret else secrets.token_bytes(32)
    tenants = Tenants(_api_keys(settings), secret)
    fleet = Fleet(
        settings.targets,
        settings.drafts,
        tokenizer_fingerprint(settings.tokenizer),
        settings.max_num_draft_tokens,
        settings.max_num_nodes,
        settings.redis_at(settings.redis_url),
        settings.deployment,
        settings.redis_at(settings.prefix_store),
        Identity.of(settings, settings.deployment),
    )
    servicer = InferenceServicer(settings, tokenizer, fleet, tenants, telemetry)
    server = RpcServer(
        f"{settings.host}:{settings.port}",
        telemetry,
        credentials=public_credentials(settings),
        health_address=settings.health_address,
        authenticate=tenants.authenticate,
        max_request_bytes=settings.max_request_bytes,
    )
    server.add("outrider.v1.Inference", inference_pb2_grpc.add_InferenceServicer_to_server, servicer)
    keep_for_good()
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


def _api_keys(settings: RouterSettings) -> Callable[[], Mapping[bytes, ApiKey]]:
    """Where to look API keys up. Raises StartupError if their file cannot be used."""
    if settings.api_keys_file is not None:
        return WatchedFiles([settings.api_keys_file], parse_api_keys).current
    keys = unlimited_keys({key.get_secret_value(): tenant for tenant, key in settings.api_keys.items()})
    return lambda: keys


async def _report_health(fleet: Fleet, server: RpcServer) -> None:
    """Keeps health at whether a target worker can be reached."""
    while True:
        async with fleet.changed:
            await fleet.changed.wait_for(lambda: fleet.usable)
        await server.set_serving(True)
        async with fleet.changed:
            await fleet.changed.wait_for(lambda: not fleet.usable)
        await server.set_serving(False)
