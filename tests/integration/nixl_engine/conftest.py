"""Workers in processes of their own, and engines that read from them."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import pytest

from shared.engine.kv_pool import KVPool
from shared.transfer.nixl.engine import NixlEngine
from tests.support.nixl_worker import Start, Worker


@pytest.fixture
def start() -> Iterator[Start]:
    workers: list[Worker] = []

    def start_one(*args: Any) -> Worker:
        workers.append(Worker(*args))
        return workers[-1]

    yield start_one
    for worker in workers:
        worker.kill()


@pytest.fixture(scope="module")
def shared_worker() -> Iterator[Worker]:
    """For tests that leave it as it is."""
    worker = Worker()
    yield worker
    worker.kill()


@pytest.fixture
async def reader() -> Any:
    engines: list[NixlEngine] = []

    def new_engine(pool: KVPool) -> NixlEngine:
        engines.append(NixlEngine(pool, f"reader-{os.getpid()}-{time.monotonic_ns()}"))
        return engines[-1]

    yield new_engine
    for engine in engines:
        await engine.close()
