"""Another router on the workers of a stack: what it learns of them stays its own."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

from outrider.v1 import inference_pb2_grpc

from services.cli.launcher import PARENT
from services.cli.ports import free_ports
from services.cli.process import ServiceProcess
from services.cli.stack import LOOPBACK, Stack
from shared.rpc.channel import connect


@asynccontextmanager
async def another_router(
    stack: Stack, targets: Sequence[str], drafts: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> AsyncIterator[tuple[ServiceProcess, inference_pb2_grpc.InferenceAsyncStub]]:
    """A router in a process of its own, with the settings of the stack's and of `environment`, and a client of it.

    It serves with these of the stack's workers, by the names of their processes, and is started again if it dies.
    Raises StartupError if it does not start.
    """
    (port,) = free_ports(LOOPBACK, 1)
    command = [sys.executable, "-m", "services.cli.main", "router", f"--host={LOOPBACK}", f"--port={port}"]
    command.append(f"--tokenizer={stack.settings.target}")
    for flag, names in (("targets", targets), ("drafts", drafts)):
        if names:
            command.append(f"--{flag}={','.join(stack.processes[name].address for name in names)}")
    its = {**os.environ, PARENT: str(os.getpid()), "OUTRIDER_ROUTER_REDIS_URL": stack.redis.url, **(environment or {})}
    process = ServiceProcess("another router", command, its, f"{LOOPBACK}:{port}", lambda name, line: None)
    supervision = asyncio.create_task(process.supervise(stack.settings.start_seconds))
    ready = asyncio.create_task(process.ready.wait())
    try:
        await asyncio.wait([ready, supervision], return_when=asyncio.FIRST_COMPLETED)
        if supervision.done():
            supervision.result()
        async with connect(process.address) as channel:
            yield process, inference_pb2_grpc.InferenceStub(channel)
        await process.stop(stack.settings.drain_seconds)
    finally:
        ready.cancel()
        process.abandon()
        await asyncio.gather(supervision, return_exceptions=True)
