"""Requests sent when they are due, whatever became of those before: an open loop."""

from __future__ import annotations

import asyncio
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import grpc
from outrider.v1 import inference_pb2, inference_pb2_grpc

from services.cli.load.prompts import Prompts
from services.simulator.outcomes import Outcomes
from services.simulator.workload import Request


@dataclass(eq=False, slots=True)
class Answer:
    """What came of a request: when each of its tokens did, in seconds since the load began.

    `late`: seconds that it was sent after it was due. `error`: the status it ended with if it did not end well.
    """

    request: Request
    late: float = 0.0
    token_times: array[float] = field(default_factory=lambda: array("d"))
    cached_tokens: int = 0
    ended_at: float | None = None
    error: str | None = None

    @property
    def ttft(self) -> float | None:
        return self.token_times[0] - self.request.time if self.token_times else None


@dataclass(slots=True)
class Load:
    """One load while it is played, and when it is over."""

    answers: list[Answer] = field(default_factory=list)
    num_requests: int = 0
    began: float = 0.0

    @property
    def num_in_flight(self) -> int:
        return sum(answer.ended_at is None for answer in self.answers)

    @property
    def errors(self) -> Counter[str]:
        """Requests that did not end well, by status."""
        return Counter(answer.error for answer in self.answers if answer.error is not None)

    def outcomes(self) -> Outcomes:
        """What the simulator reports, of the requests that ended well."""
        outcomes = Outcomes()
        well = [(place, each) for place, each in enumerate(self.answers) if each.error is None and each.token_times]
        for _, answer in well:
            outcomes.arrived(answer.request.time)
        for place, answer in sorted(well, key=lambda entry: entry[1].token_times[-1]):
            # A stop token may have ended it before its time.
            request = answer.request._replace(num_output_tokens=len(answer.token_times))
            outcomes.ended(place, request, answer.token_times[0], answer.token_times[-1])
            outcomes.inter_token.update(after - before for before, after in pairwise(answer.token_times))
            outcomes.prompt_tokens += request.num_prompt_tokens
            outcomes.cached_tokens += answer.cached_tokens
        return outcomes


async def play(
    stub: inference_pb2_grpc.InferenceAsyncStub,
    requests: Sequence[Request],
    prompts: Prompts,
    fields: dict[str, Any],
    metadata: Sequence[tuple[str, str]],
    told: Callable[[Load], None],
) -> Load:
    """Sends each request when it is due and waits until all have ended; `told` is called as soon as it begins.

    `fields`: of every GenerateRequest, beside its prompt and length. A request that fails is counted, and the others go
    on.
    """
    loop = asyncio.get_running_loop()
    load = Load(num_requests=len(requests), began=loop.time())
    told(load)
    async with asyncio.TaskGroup() as group:
        for number, request in enumerate(requests):
            message = inference_pb2.GenerateRequest(max_tokens=request.num_output_tokens, **fields)
            message.token_ids.ids.extend(prompts.draw(request))
            await asyncio.sleep(load.began + request.time - loop.time())
            answer = Answer(request, loop.time() - load.began - request.time)
            load.answers.append(answer)
            group.create_task(_ask(stub, message, metadata, answer, load.began), name=f"request {number}")
    return load


async def _ask(
    stub: inference_pb2_grpc.InferenceAsyncStub,
    message: inference_pb2.GenerateRequest,
    metadata: Sequence[tuple[str, str]],
    answer: Answer,
    began: float,
) -> None:
    loop = asyncio.get_running_loop()
    try:
        async for chunk in stub.Generate(message, metadata=tuple(metadata)):
            answer.token_times.extend([loop.time() - began] * len(chunk.token_ids))
            if chunk.HasField("usage"):
                answer.cached_tokens = chunk.usage.cached_tokens
    except grpc.aio.AioRpcError as error:
        answer.error = error.code().name
    finally:
        answer.ended_at = loop.time() - began
