"""A second router to be measured beside that of a stack."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

from outrider.v1 import inference_pb2_grpc

from services.cli.stack import Stack
from tests.benchmarks.errors import BenchmarkError
from tests.support.another_router import another_router


@asynccontextmanager
async def second_router(
    stack: Stack, targets: Sequence[str], drafts: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> AsyncIterator[inference_pb2_grpc.InferenceAsyncStub]:
    """A client of `another_router`. Raises BenchmarkError on leaving if it died meanwhile."""
    async with another_router(stack, targets, drafts, environment) as (process, stub):
        yield stub
        if process.restarts:
            raise BenchmarkError("the second router died and was started again while being measured")
