"""A process with a KV pool that can be read from by nixl, and what a read has to bring."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Coroutine, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from shared.engine.kv_pool import KVPool, KVShape
from shared.transfer.engine import BlockRead
from shared.transfer.nixl.engine import NixlEngine
from shared.transfer.nixl.library import nixl_available

needs_nixl = pytest.mark.skipif(not nixl_available(), reason="nixl cannot be imported: install outrider[nixl]")

NUM_BLOCKS = 512
ALL = [BlockRead(block, block) for block in range(NUM_BLOCKS)]
SHAPE = KVShape(8, 4, 64, 64)
BFLOAT16 = torch.bfloat16
# Longer than any read that gets on takes.
BOUND_SECONDS = 30.0

Reader = Callable[..., NixlEngine]
Start = Callable[..., "Worker"]


def new_pool(seed: int | None = None, dtype: torch.dtype = BFLOAT16, block_size: int = 16) -> KVPool:
    """A pool of blocks of 128 KiB (bfloat16); zeros without a seed."""
    pool = KVPool(SHAPE, NUM_BLOCKS, block_size, dtype, torch.device("cpu"))
    if seed is not None:
        pool.data.view(torch.uint8).random_(0, 256, generator=torch.Generator().manual_seed(seed))
    return pool


def serve(pipe: Connection, seed: int, dtype: torch.dtype, environment: dict[str, str]) -> None:
    """Another process: can be read from until the pipe says anything; then tells what processor time it took idle."""
    os.environ.update(environment)
    engine = NixlEngine(new_pool(seed, dtype), f"worker-{os.getpid()}")
    before = time.process_time()
    pipe.send(engine.metadata)
    pipe.recv()
    pipe.send(time.process_time() - before)
    asyncio.run(engine.close())


class Worker:
    """A process with a pool of random bytes, and the bytes."""

    def __init__(self, seed: int = 1, dtype: torch.dtype = BFLOAT16) -> None:
        # Forked from a process that has torch, not nixl, whose threads would be lost.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["shared.transfer.nixl.engine"])
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, seed, dtype, dict(os.environ)), daemon=True)
        self.process.start()
        theirs.close()
        assert self._pipe.poll(60), "the worker has not started"
        self.metadata: bytes = self._pipe.recv()
        self.pool = new_pool(seed, dtype)

    def send_signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)
        if number == signal.SIGSTOP:
            # It is no child of ours, to be waited for.
            while Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
                time.sleep(0.001)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def idle_seconds(self) -> float:
        """Ends it. Processor time since it began to serve."""
        self._pipe.send(None)
        assert self._pipe.poll(60)
        seconds: float = self._pipe.recv()
        self.process.join()
        return seconds


def assert_read(source: KVPool, destination: KVPool, reads: Sequence[BlockRead]) -> None:
    """Every block is where it should be, and no other was written to."""
    expected = torch.zeros_like(destination.data).view(torch.uint8)
    for read in reads:
        expected[read.destination] = source.data[read.source].view(torch.uint8)
    assert torch.equal(destination.data.view(torch.uint8), expected)


async def within_bound(read: Coroutine[Any, Any, Any]) -> Any:
    async with asyncio.timeout(BOUND_SECONDS):
        return await read
