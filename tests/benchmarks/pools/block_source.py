"""Another process, with KV blocks in its cache that can be read."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Final

import torch

from shared.engine.kv_pool import KVPool, KVShape
from shared.engine.sequence import Sequence as EngineSequence
from shared.engine.step_plan import StepPlan
from shared.prefix.block_hash import hash_blocks
from shared.sampling.params import SamplingParams
from shared.transfer.engine import TransferEngine
from shared.transfer.grpc import GrpcEngine
from shared.transfer.nixl.engine import NixlEngine
from shared.transfer.nixl.library import nixl_available
from tests.benchmarks.errors import BenchmarkError
from tests.benchmarks.pools.raw_nixl import RawAgent
from tests.support.kv_engine import KVEngine, KVWorker, kv_worker
from tests.support.machine import BLOCK_SIZE, ROOT

BLOCK_TOKENS: Final = 16
"""Of the synthetic target: a block here has as many bytes as so many tokens of it."""

LEASE_SECONDS: Final = 60.0
"""Long: the reader is busy for seconds with other things than the blocks that it holds."""

_SHAPE = KVShape(num_layers=24, num_kv_heads=4 * BLOCK_TOKENS // BLOCK_SIZE, key_head_dim=64, value_head_dim=64)
_START_SECONDS = 60.0
_POLL_SECONDS = 0.01
# More than any prompt has.
_MAX_BATCH_TOKENS = 1 << 16


class PoolEngine(KVEngine):
    """An engine that computes nothing: a block counts as computed whatever is in it."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks, _MAX_BATCH_TOKENS)
        self.pool = new_pool(num_blocks)

    def _compute(self, plan: StepPlan) -> None:
        pass


def new_pool(num_blocks: int) -> KVPool:
    """In bfloat16."""
    return KVPool(_SHAPE, num_blocks, BLOCK_SIZE, torch.bfloat16, torch.device("cpu"))


def fill(pool: KVPool) -> None:
    """With what the source has in its own, if that has as many blocks: numbers that differ everywhere."""
    numbers = pool.data.view(-1).view(torch.int32)
    torch.arange(len(numbers), out=numbers)


def prompt_of(num_blocks: int) -> list[int]:
    """The prompt that the source has so many blocks of, which are those of no other."""
    return [num_blocks] * (num_blocks * BLOCK_SIZE)


def make_transfer_engines(pool: KVPool) -> dict[str, TransferEngine]:
    """By name, all that there are here."""
    engines: dict[str, TransferEngine] = {GrpcEngine.name: GrpcEngine(pool)}
    if nixl_available():
        engines[NixlEngine.name] = NixlEngine(pool, f"bench-{os.getpid()}")
    return engines


@dataclass(frozen=True, slots=True)
class BlockSource:
    """What there is to be read and how: the worker's address, each engine's metadata, where nixl itself finds the pool
    (None without nixl), and in which blocks each prompt lies, by their number."""

    address: str
    metadata: Mapping[str, bytes]
    raw: tuple[bytes, int] | None
    blocks: Mapping[int, Sequence[int]]


@contextmanager
def block_source(num_blocks: int, prompts: Sequence[int]) -> Iterator[BlockSource]:
    """A process that has prompts of so many blocks each in a pool of `num_blocks`. Raises BenchmarkError."""
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=_run, args=(theirs, num_blocks, prompts), daemon=True)
    process.start()
    theirs.close()
    try:
        if not pipe.poll(_START_SECONDS):
            raise BenchmarkError(f"the process with blocks to read has not started in {_START_SECONDS:g} s")
        source: BlockSource = pipe.recv()
        yield source
        pipe.send(None)
        process.join(_START_SECONDS)
    except EOFError:
        raise BenchmarkError("the process with blocks to read ended") from None
    finally:
        process.kill()
        process.join()


def _run(pipe: Connection, num_blocks: int, prompts: Sequence[int]) -> None:
    asyncio.run(_serve(pipe, num_blocks, prompts))


async def _serve(pipe: Connection, num_blocks: int, prompts: Sequence[int]) -> None:
    engine = PoolEngine(num_blocks)
    fill(engine.pool)
    engines = make_transfer_engines(engine.pool)
    raw = RawAgent(f"raw-{os.getpid()}", engine.pool) if NixlEngine.name in engines else None
    async with kv_worker(engine, LEASE_SECONDS, engines) as worker:
        blocks = {count: await _compute(worker, count) for count in prompts}
        metadata = {name: each.metadata for name, each in engines.items()}
        pipe.send(BlockSource(worker.address, metadata, raw.place if raw is not None else None, blocks))
        await asyncio.to_thread(pipe.recv)
    if raw is not None:
        raw.close()


async def _compute(worker: KVWorker, num_blocks: int) -> list[int]:
    """Has the worker compute such a prompt; the blocks that it is cached in."""
    params = SamplingParams(temperature=0.0, max_tokens=1)
    prompt = prompt_of(num_blocks)
    await worker.add(EngineSequence(prompt, len(prompt), params, ROOT, num_steps=1))
    hashes = hash_blocks(prompt, BLOCK_SIZE, ROOT)
    blocks: list[int] = []
    while len(blocks) < num_blocks:
        await asyncio.sleep(_POLL_SECONDS)
        found = await worker.loop.ask(lambda: worker.engine.blocks.match(hashes))
        blocks = [block for block in found if block is not None]
    return blocks
