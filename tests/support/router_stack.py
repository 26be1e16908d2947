"""A router on fake workers, in this process and over real gRPC: what the tests of its sessions share."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from outrider.v1 import inference_pb2, inference_pb2_grpc, worker_pb2

from services.router.clients.tenants import Tenants
from services.router.server import InferenceServicer
from services.router.settings import RouterSettings
from services.router.text.tokenizer import TextTokenizer
from services.router.workers.fleet import Fleet
from shared.engine.tokenizer_fingerprint import vocabulary_fingerprint
from shared.rpc.channel import connect
from shared.rpc.server import RpcServer
from shared.security.api_keys import ApiKey
from shared.telemetry.tracing import configure
from tests.support.fake_drafter import FakeDrafter
from tests.support.fake_target import FakeTarget
from tests.support.fake_workers import draft_tokens, next_token, plain_output
from tests.support.models import byte_tokenizer
from tests.support.usage import check_usage

TOKENIZER = byte_tokenizer()
FINGERPRINT = vocabulary_fingerprint(TOKENIZER.get_vocab())
PROMPT = [5, 17, 40, 8]
MAX_TOKENS = 24
GREEDY = plain_output(PROMPT, MAX_TOKENS)


@dataclass
class Output:
    """What came back of one request, by sequence."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    text: dict[int, str] = field(default_factory=dict)
    finish: dict[int, int] = field(default_factory=dict)
    draft_tokens: list[inference_pb2.DraftToken] = field(default_factory=list)
    usage: inference_pb2.Usage | None = None
    in_chains: bool = False

    def take(self, chunk: inference_pb2.GenerateResponse) -> None:
        assert self.usage is None, "a chunk behind the usage"
        assert chunk.index not in self.finish, "a chunk behind the finish"
        self.tokens.setdefault(chunk.index, []).extend(chunk.token_ids)
        self.text[chunk.index] = self.text.get(chunk.index, "") + chunk.text
        self.draft_tokens.extend(chunk.draft_tokens)
        if chunk.finish_reason:
            self.finish[chunk.index] = chunk.finish_reason
        if chunk.HasField("usage"):
            self.usage = chunk.usage
            check_usage(chunk.usage, sum(map(len, self.tokens.values())), self.draft_tokens, self.in_chains)


@dataclass
class Stack:
    """A router on fake workers, and a client of it."""

    targets: list[FakeTarget]
    drafter: FakeDrafter | None
    fleet: Fleet
    servicer: InferenceServicer
    server: RpcServer
    stub: Any
    address: str

    @property
    def target(self) -> FakeTarget:
        return self.targets[0]

    async def generate(self, request: inference_pb2.GenerateRequest | None = None, **call: Any) -> Output:
        request = request or greedy()
        in_chains = request.speculation.HasField("num_draft_tokens") and not request.speculation.num_nodes
        return await read(self.stub.Generate(request, **call), in_chains)

    async def until_idle(self) -> None:
        """Every lane is given up, and every worker has heard of it."""
        workers = [*self.targets, *([self.drafter] if self.drafter is not None else [])]
        await until(lambda: self.servicer.admission.num_running == 0, "no request runs")
        await until(lambda: all(link.num_lanes == 0 for link in self.fleet.targets), "no lane is left")
        await until(lambda: all(worker.num_sequences == 0 for worker in workers), "no sequence is left")
        await until(lambda: all(target.num_pulls == 0 for target in self.targets), "no pull is left")
        assert all(link.num_incoming == 0 for link in self.fleet.targets)
        for worker in workers:
            assert worker.violations == []


class FirstOnes(random.Random):
    """Draws the first of those that are as good as each other."""

    def sample(self, population: Any, k: int, *, counts: Any = None) -> Any:
        return population[:k]


async def read(call: Any, in_chains: bool = False) -> Output:
    """`in_chains`: whether no trees were drafted."""
    output = Output(in_chains=in_chains)
    async for chunk in call:
        output.take(chunk)
    return output


async def read_all(call: Any) -> grpc.StatusCode:
    """Reads to the end, which is not a good one; its status."""
    try:
        async for _ in call:
            pass
    except (asyncio.CancelledError, grpc.aio.AioRpcError):
        pass
    code: grpc.StatusCode = await call.code()
    return code


async def until(condition: Callable[[], bool], what: str, seconds: float = 10.0) -> None:
    """Returns when the condition holds; fails if it does not within that time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"never: {what}"
        await asyncio.sleep(0.002)


def greedy(
    num_draft_tokens: int | None = None, max_tokens: int = MAX_TOKENS, **fields: Any
) -> inference_pb2.GenerateRequest:
    speculation = inference_pb2.Speculation(num_draft_tokens=num_draft_tokens)
    return inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=PROMPT),
        max_tokens=max_tokens,
        temperature=fields.pop("temperature", 0.0),
        speculation=fields.pop("speculation", speculation),
        **fields,
    )


@asynccontextmanager
async def stack(
    num_targets: int = 1,
    drafter: bool = True,
    roles: Sequence[worker_pb2.Role] = (),
    keys: Callable[[], Mapping[bytes, ApiKey]] = dict,
    redis_url: str | None = None,
    **settings: Any,
) -> AsyncIterator[Stack]:
    """With `roles`, a target worker of each in place of `num_targets`."""
    targets = [FakeTarget(FINGERPRINT, role) for role in roles or [worker_pb2.ROLE_BOTH] * num_targets]
    draft = FakeDrafter(FINGERPRINT) if drafter else None
    workers = [*targets, *([draft] if draft is not None else [])]
    for worker in workers:
        await worker.start()
    telemetry = configure("outrider-router", None)
    options = RouterSettings.load(
        targets=[target.address for target in targets], tokenizer="unused", port=0, failover_seconds=10.0, **settings
    )
    fleet = Fleet(
        options.targets,
        [draft.address] if draft is not None else [],
        FINGERPRINT,
        options.max_num_draft_tokens,
        options.max_num_nodes,
        redis_url,
    )
    servicer = InferenceServicer(options, TextTokenizer(TOKENIZER), fleet, Tenants(keys, b"secret"), telemetry)
    server = RpcServer("127.0.0.1:0", telemetry)
    server.add("outrider.v1.Inference", inference_pb2_grpc.add_InferenceServicer_to_server, servicer)
    await server.start()
    fleet.start()
    try:
        await until(lambda: all(link.connected for link in fleet.targets), "targets connected")
        await until(lambda: all(target.streams for target in targets), "streams open")
        await until(lambda: all(link.connected for link in fleet.drafts), "drafter connected")
        async with connect(server.address) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            yield Stack(targets, draft, fleet, servicer, server, stub, server.address)
    finally:
        await server.stop()
        await asyncio.wait_for(fleet.close(), 5)
        for worker in workers:
            await worker.stop()


def expected_rounds(num_draft_tokens: int, max_tokens: int) -> list[tuple[int, int]]:
    """(drafted, accepted) of each round, straight from the two functions."""
    tokens, rounds = [*PROMPT, next_token(PROMPT)], []
    while (left := max_tokens - (len(tokens) - len(PROMPT))) > 0:
        drafted = draft_tokens(tokens, min(num_draft_tokens, left - 1))
        accepted = 0
        while accepted < len(drafted) and drafted[accepted] == next_token([*tokens, *drafted[:accepted]]):
            accepted += 1
        tokens += drafted[:accepted]
        tokens.append(next_token(tokens))
        if drafted:
            rounds.append((len(drafted), accepted))
    return rounds
