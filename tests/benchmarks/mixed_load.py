"""What clients of all kinds ask, beside the seeded streams of a soak: prompts of all lengths, several sequences at
once, every way to sample, and clients that leave or are in a hurry."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import grpc
from outrider.v1 import inference_pb2, inference_pb2_grpc

from tests.support.containers import Load
from tests.support.service import collect, request

NUM_CLIENTS = 4
MOST_PROMPT_TOKENS = 1800
MOST_OUTPUT_TOKENS = 96
SHARED_PREFIX_TOKENS = 320
VOCABULARY = 4096
LEAVING_SHARE, HURRIED_SHARE = 0.15, 0.1

_Call = grpc.aio.UnaryStreamCall[inference_pb2.GenerateRequest, inference_pb2.GenerateResponse]


@dataclass
class MixedLoad:
    """Requests one after another, `NUM_CLIENTS` at a time. `beside`: says when errors are forgiven.

    `ends`: how streams ended, by word or status.
    """

    beside: Load
    rng: random.Random
    ends: Counter[str] = field(default_factory=Counter)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Under load within; raises whatever a stream raised, at the end."""
        async with self.beside.containers.client() as stub:
            tasks = [asyncio.create_task(self._client(stub)) for _ in range(NUM_CLIENTS)]
            try:
                yield
                assert not [task for task in tasks if task.done()], [task.exception() for task in tasks if task.done()]
            finally:
                for task in tasks:
                    task.cancel()
                for task in tasks:
                    with suppress(asyncio.CancelledError):
                        await task

    async def _client(self, stub: inference_pb2_grpc.InferenceAsyncStub) -> None:
        metadata = (("authorization", f"Bearer {self.beside.containers.api_key}"),)
        while True:
            leaves, hurried = self.rng.random() < LEAVING_SHARE, self.rng.random() < HURRIED_SHARE
            seconds = self.rng.uniform(0.05, 2.0) if hurried else None
            call = stub.Generate(self._request(), metadata=metadata, timeout=seconds)
            try:
                if leaves:
                    await self._leave(call)
                    self.ends["left"] += 1
                else:
                    await collect(call)
                    self.ends["whole"] += 1
            except grpc.aio.AioRpcError as error:
                if not self.beside.forgiven and not (hurried and error.code() == grpc.StatusCode.DEADLINE_EXCEEDED):
                    raise
                self.ends[error.code().name] += 1
                await asyncio.sleep(0.2)

    async def _leave(self, call: _Call) -> None:
        left = self.rng.randrange(5)
        async for _ in call:
            if left == 0:
                call.cancel()
                return
            left -= 1

    def _request(self) -> inference_pb2.GenerateRequest:
        rng = self.rng
        num_tokens = min(round(rng.lognormvariate(5, 1.2)) + 1, MOST_PROMPT_TOKENS)
        prompt = [rng.randrange(1, VOCABULARY) for _ in range(num_tokens)]
        if rng.random() < 0.3:
            shared = random.Random(rng.randrange(3))
            prefix = [shared.randrange(1, VOCABULARY) for _ in range(SHARED_PREFIX_TOKENS)]
            prompt = (prefix + prompt)[:MOST_PROMPT_TOKENS]
        made = request(
            prompt,
            gamma=rng.choice((None, None, None, 0, 2, 8)),
            max_tokens=rng.randint(1, MOST_OUTPUT_TOKENS),
            temperature=rng.choice((0.0, 0.7, 1.0, 1.5)),
            top_k=rng.choice((0, 0, 40)),
            top_p=rng.choice((1.0, 0.9)),
            frequency_penalty=rng.choice((0.0, 0.5)),
            stop=rng.choice(([], ["\n\n"], ["return"])),
            n=rng.choice((1, 1, 1, 2, 4)),
        )
        if rng.random() < 0.1:
            made.logprobs = 5
        return made
