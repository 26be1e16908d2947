"""Whole stacks of real processes, and a client that collects what they stream."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterable, AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
from outrider.v1 import draft_pb2_grpc, inference_pb2, inference_pb2_grpc, target_pb2_grpc, worker_pb2

from services.cli.launcher import worker_environment
from services.cli.process import ServiceProcess
from services.cli.stack import LOOPBACK, Stack, StackSettings
from shared.rpc.channel import connect
from shared.settings import StartupError
from tests.support.usage import check_usage

MODEL_ALONE = {"OUTRIDER_DRAFT_COPIED_TOKENS": "0"}
"""Of a drafter that proposes what its model draws, and copies nothing of what was generated for the same prompt."""
COPYING_NOTHING = {"OUTRIDER_TARGET_COPIED_TOKENS": "0"}
"""Of a target that does not either, where γ is adaptive."""

IDLE_SECONDS = 30.0
_POLL_SECONDS = 0.05

OnChunk = Callable[[inference_pb2.GenerateResponse], None]


@dataclass(slots=True)
class Output:
    """What one sequence of a request streamed."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: inference_pb2.FinishReason = inference_pb2.FINISH_REASON_UNSPECIFIED
    draft_tokens: list[inference_pb2.DraftToken] = field(default_factory=list)


@dataclass(slots=True)
class Generated:
    """A request's whole answer: its sequences by index, and the usage of the last chunk."""

    outputs: list[Output]
    usage: inference_pb2.Usage

    @property
    def token_ids(self) -> list[int]:
        """Of the first sequence."""
        return self.outputs[0].token_ids


@asynccontextmanager
async def running_stack(
    environment: Mapping[str, Mapping[str, str]] | None = None, **settings: Any
) -> AsyncIterator[Stack]:
    """A stack in float32 with one thread a worker, ready to serve; `settings` are StackSettings' own.

    `environment` adds to each process's, by the process's name.
    """
    defaults: dict[str, Any] = {"port": 0, "dtype": "float32", "num_threads": 1, "drain_seconds": 5.0}
    async with Stack(StackSettings(**(defaults | settings), environment=environment or {})) as stack:
        yield stack


@asynccontextmanager
async def inference(stack: Stack) -> AsyncIterator[inference_pb2_grpc.InferenceAsyncStub]:
    """A client of the stack's router, over a connection of its own."""
    async with connect(stack.router_address) as channel:
        yield inference_pb2_grpc.InferenceStub(channel)


async def refused_start(service: str, *options: str) -> list[str]:
    """The lines that a service says which ends because it cannot start so: with EXIT_CONFIG."""
    lines: list[str] = []
    command = [sys.executable, "-m", "services.cli.main", service, "--port=0", *options]
    environment = worker_environment(os.environ)
    process = ServiceProcess(service, command, environment, f"{LOOPBACK}:1", lambda _, line: lines.append(line))
    with pytest.raises(StartupError) as error:
        await process.supervise(IDLE_SECONDS)
    # What it says of other ends than by EXIT_CONFIG.
    assert f"{service} ended with" not in str(error.value), lines
    return lines


def request(
    prompt: str | Sequence[int],
    *,
    gamma: int | None = None,
    num_nodes: int | None = None,
    sources: Sequence[inference_pb2.DraftSource] = (),
    **fields: Any,
) -> inference_pb2.GenerateRequest:
    """A request for a text or for token ids; `gamma` None is adaptive, with `num_nodes` it drafts trees, `sources` say
    who may, `fields` are GenerateRequest's own."""
    made = inference_pb2.GenerateRequest(**fields)
    if isinstance(prompt, str):
        made.text = prompt
    else:
        made.token_ids.ids.extend(prompt)
    if gamma is not None:
        made.speculation.num_draft_tokens = gamma
    if num_nodes is not None:
        made.speculation.num_nodes = num_nodes
    made.speculation.sources.extend(sources)
    return made


async def collect(
    call: AsyncIterable[inference_pb2.GenerateResponse], on_chunk: OnChunk | None = None, in_chains: bool = False
) -> Generated:
    """Reads a stream to its end, and holds it to the protocol: nothing behind a sequence's finish reason, a true
    usage (`check_usage`, which `in_chains` is for) on the last chunk alone. `on_chunk` is called after each. Raises
    AioRpcError as the call does."""
    outputs: dict[int, Output] = {}
    usage: inference_pb2.Usage | None = None
    async for chunk in call:
        assert usage is None, "a chunk came behind the one with the usage"
        output = outputs.setdefault(chunk.index, Output())
        assert not output.finish_reason, f"sequence {chunk.index} went on behind its finish reason"
        output.token_ids += chunk.token_ids
        output.text += chunk.text
        output.finish_reason = chunk.finish_reason
        output.draft_tokens += chunk.draft_tokens
        if chunk.HasField("usage"):
            usage = chunk.usage
        if on_chunk is not None:
            on_chunk(chunk)
    assert usage is not None, "the stream ended without its usage"
    assert sorted(outputs) == list(range(len(outputs)))
    assert all(output.finish_reason for output in outputs.values())
    generated = Generated([outputs[index] for index in sorted(outputs)], usage)
    shown = [token for output in generated.outputs for token in output.draft_tokens]
    # Where a target chooses itself what it drafts or copies, that is trees.
    in_chains = in_chains and all(its.source == inference_pb2.DRAFT_SOURCE_MODEL for its in usage.by_source)
    check_usage(usage, sum(len(output.token_ids) for output in generated.outputs), shown, in_chains)
    return generated


async def generate(
    stub: inference_pb2_grpc.InferenceAsyncStub,
    prompt: str | Sequence[int],
    *,
    gamma: int | None = None,
    num_nodes: int | None = None,
    api_key: str | None = None,
    on_chunk: OnChunk | None = None,
    **fields: Any,
) -> Generated:
    """Sends a `request`, as the tenant of `api_key` if there is one, and returns the whole answer."""
    metadata = (("authorization", f"Bearer {api_key}"),) if api_key is not None else None
    call = stub.Generate(request(prompt, gamma=gamma, num_nodes=num_nodes, **fields), metadata=metadata)
    return await collect(call, on_chunk, in_chains=gamma is not None and num_nodes is None)


async def worker_state(stack: Stack, name: str) -> worker_pb2.WorkerState:
    """KV accounting of the worker process `name`; the worker proves its own reference counts before it answers."""
    async with connect(stack.processes[name].address) as channel:
        stub: Any = draft_pb2_grpc.DrafterStub if name.startswith("draft") else target_pb2_grpc.TargetStub
        state: worker_pb2.WorkerState = await stub(channel).GetWorkerState(worker_pb2.GetWorkerStateRequest())
    return state


async def wait_until_idle(stack: Stack, seconds: float = IDLE_SECONDS) -> None:
    """Returns when no worker holds a sequence or owns a block, with every block accounted for.

    Workers that are being started again are waited for. Raises AssertionError if that is not so in time.
    """
    for name, process in stack.processes.items():
        if name == "router":
            continue
        state: worker_pb2.WorkerState | None = None
        try:
            async with asyncio.timeout(seconds):
                await process.ready.wait()
                while state is None or state.num_sequences or state.owned_blocks:
                    if state is not None:
                        await asyncio.sleep(_POLL_SECONDS)
                    state = await worker_state(stack, name)
        except TimeoutError:
            raise AssertionError(f"{name} is not idle after {seconds:g} s: {state}") from None
        assert state.num_exports == state.num_imports == 0, f"{name}: {state}"
        assert state.free_blocks + state.cached_blocks + state.owned_blocks == state.total_blocks, f"{name}: {state}"


def status(error: grpc.aio.AioRpcError) -> grpc.StatusCode:
    """The status that a call ended with."""
    code = error.code()
    assert isinstance(code, grpc.StatusCode)
    return code
