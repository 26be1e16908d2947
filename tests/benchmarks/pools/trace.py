"""A trace of requests, played against the service: the same that the simulator plays."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import TypeAlias

import grpc
from outrider.v1 import inference_pb2, inference_pb2_grpc

from services.simulator.outcomes import Outcomes
from services.simulator.workload import Request
from tests.benchmarks.errors import BenchmarkError
from tests.benchmarks.prompts import Prompts
from tests.support.service import generate

Choose: TypeAlias = "Callable[[int, Request], inference_pb2_grpc.InferenceAsyncStub]"
"""The client by which a request, the n-th from 0, is sent."""


@dataclass(frozen=True, slots=True)
class Served:
    """A request and when its tokens came: seconds, as its own time, since the trace began.

    `request` has as many output tokens as came. `cached_tokens`: of its prompt, by the usage; 0 if it was cut off.
    """

    request: Request
    token_times: tuple[float, ...]
    cached_tokens: int

    @property
    def gaps(self) -> list[float]:
        """Seconds between a token and the one before, from the second on."""
        return [after - before for before, after in pairwise(self.token_times)]


def draw_prompts(requests: Sequence[Request], prompts: Prompts) -> list[list[int]]:
    """A prompt for each; those of one prefix begin with the same tokens."""
    prefixes: dict[str, list[int]] = {}
    drawn = []
    for request in requests:
        prefix: list[int] = []
        if request.prefix_id is not None:
            prefix = prefixes.setdefault(request.prefix_id, prompts(request.prefix_tokens))
        drawn.append(prefix + prompts(request.num_prompt_tokens - len(prefix)))
    return drawn


async def play(
    requests: Sequence[Request],
    texts: Sequence[list[int]],
    choose: Choose,
    cut_off: Mapping[int, float] = MappingProxyType({}),
) -> list[Served]:
    """Sends each request with its prompt when it is due, whatever became of those before; waits until all have ended.

    Those in `cut_off`, by their places, end after so many seconds, wherever they are. Greedy, without speculation, past
    any end of text. Raises BenchmarkError if a stream fails or brings nothing; the others end with it.
    """
    loop = asyncio.get_running_loop()
    began = loop.time()
    streams = [
        _serve(choose(place, request), request, text, began, cut_off.get(place))
        for place, (request, text) in enumerate(zip(requests, texts, strict=True))
    ]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(stream) for stream in streams]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


def outcomes_of(served: Sequence[Served]) -> Outcomes:
    """What the simulator reports of the same requests."""
    outcomes = Outcomes()
    for request in (each.request for each in served):
        outcomes.arrived(request.time)
    in_order = sorted(enumerate(served), key=lambda entry: entry[1].token_times[-1])
    for place, each in in_order:
        outcomes.ended(place, each.request, each.token_times[0], each.token_times[-1])
        outcomes.inter_token.update(each.gaps)
        outcomes.prompt_tokens += each.request.num_prompt_tokens
        outcomes.cached_tokens += each.cached_tokens
    return outcomes


async def _serve(
    stub: inference_pb2_grpc.InferenceAsyncStub, request: Request, text: list[int], began: float, until: float | None
) -> Served:
    loop = asyncio.get_running_loop()
    times = array("d")

    def note(chunk: inference_pb2.GenerateResponse) -> None:
        times.extend([loop.time() - began] * len(chunk.token_ids))

    await asyncio.sleep(began + request.time - loop.time())
    cached_tokens = 0
    try:
        async with asyncio.timeout_at(None if until is None else began + until):
            generated = await generate(
                stub,
                text,
                on_chunk=note,
                max_tokens=request.num_output_tokens,
                temperature=0.0,
                ignore_eos=True,
                speculation=inference_pb2.Speculation(enabled=False),
            )
            cached_tokens = generated.usage.cached_tokens
    except TimeoutError:
        pass
    except grpc.aio.AioRpcError as error:
        raise BenchmarkError(f"a stream failed with {error.code().name}: {error.details()}") from error
    if not times:
        raise BenchmarkError(f"a stream brought no token in {until} s")
    return Served(request._replace(num_output_tokens=len(times)), tuple(times), cached_tokens)
