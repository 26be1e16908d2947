"""An engine without a model: real scheduler, real pool; a position's KV is a function of the tokens up to it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch
from outrider.v1 import transfer_pb2, transfer_pb2_grpc

from shared.engine.block_pool import BlockPool
from shared.engine.engine import Engine, Gain, StepOutcome
from shared.engine.host_pool import HostPool
from shared.engine.host_tier import HostTier
from shared.engine.kv_pool import KVPool, KVShape
from shared.engine.loop import EngineLoop
from shared.engine.scheduler import Scheduler
from shared.engine.sequence import Sequence
from shared.engine.step_plan import StepPlan
from shared.rpc.server import RpcServer
from shared.sampling.sampled import SampledTokens
from shared.telemetry.tracing import configure
from shared.transfer.engine import TransferEngine
from shared.transfer.fetch import Fetcher
from shared.transfer.grpc import GrpcEngine
from shared.transfer.offers import Offers
from shared.transfer.servicer import TransferServicer
from tests.support.machine import BLOCK_SIZE, next_token

SHAPE = KVShape(num_layers=3, num_kv_heads=2, key_head_dim=8, value_head_dim=8)


class KVEngine:
    """Steps as `Engine` does, and proves at each of them that every position it reads holds its own past."""

    def __init__(self, num_blocks: int = 64, max_batch_tokens: int = 64, num_host_blocks: int = 0) -> None:
        self.pool = KVPool(SHAPE, num_blocks, BLOCK_SIZE, torch.float32, torch.device("cpu"))
        host = HostTier(num_host_blocks, HostPool(self.pool, num_host_blocks)) if num_host_blocks else None
        self.blocks = BlockPool(num_blocks, host)
        self.block_size = BLOCK_SIZE
        self.fingerprint = "f"
        self.scheduler = Scheduler(self.blocks, BLOCK_SIZE, max_batch_tokens, 64)
        self.num_computed = 0
        # Cleared: no step is taken.
        self.gate = threading.Event()
        self.gate.set()

    def step(self) -> StepOutcome | None:
        self.gate.wait()
        plan = self.scheduler.schedule()
        if plan is None:
            return None
        self.num_computed += plan.num_tokens
        self._compute(plan)
        sampled = [
            SampledTokens((next_token(item.sequence.token_ids, item.sequence.params.sequence_index),), 0)
            for item in plan.scheduled
            if item.num_rows
        ]
        gains = [Gain(sequence, tokens, 0) for sequence, tokens in self.scheduler.complete(plan, sampled)]
        self.scheduler.check()
        return StepOutcome(gains, [], plan.num_tokens, len(plan.scheduled), 0, 0.0)

    def _compute(self, plan: StepPlan) -> None:
        self.pool.copy_blocks(plan.copies)
        for item in plan.scheduled:
            tokens = item.sequence.token_ids
            for position in range(item.start + item.num_tokens):
                slot = self.pool.data[item.sequence.block_table[position // BLOCK_SIZE], :, :, position % BLOCK_SIZE]
                expected = kv_of(tokens[: position + 1])
                if position >= item.start:
                    slot.copy_(expected)
                else:
                    assert torch.equal(slot, expected), f"position {position} holds another past"


def kv_of(tokens: list[int]) -> torch.Tensor:
    """`[num_layers, 2, num_kv_heads, head_dim]` of the last of these tokens."""
    seed = next_token(tokens, 0) + 64 * len(tokens) + sum(tokens)
    count = SHAPE.num_layers * 2 * SHAPE.num_kv_heads * SHAPE.head_dim
    return (torch.arange(count, dtype=torch.float32) + seed).view(
        SHAPE.num_layers, 2, SHAPE.num_kv_heads, SHAPE.head_dim
    )


def layout_of(pool: KVPool, fingerprint: str = "f") -> transfer_pb2.BlockLayout:
    return transfer_pb2.BlockLayout(
        fingerprint=fingerprint,
        model="m",
        dtype=str(pool.data.dtype).removeprefix("torch."),
        block_size=pool.block_size,
        block_bytes=pool.block_num_bytes,
    )


@dataclass
class KVWorker:
    """A worker that offers and fetches, and nothing else."""

    engine: KVEngine
    loop: EngineLoop
    offers: Offers
    servicer: TransferServicer
    server: RpcServer
    fetcher: Fetcher
    engines: dict[str, TransferEngine]

    @property
    def address(self) -> str:
        return self.server.address

    async def add(self, sequence: Sequence, ticket: bytes | None = None) -> None:
        """Begins a sequence, and offers its blocks."""

        def begin() -> None:
            self.engine.scheduler.add(sequence)
            if ticket is not None:
                self.offers.offer(ticket, sequence)

        await self.loop.ask(begin)

    async def remove(self, sequence: Sequence) -> None:
        await self.loop.ask(lambda: self.engine.scheduler.remove(sequence))

    async def until_idle(self) -> None:
        """Nothing is owned by anybody."""

        def owned() -> int:
            self.engine.scheduler.check()
            return self.engine.blocks.counts().owned

        deadline = time.monotonic() + 20
        while num_owned := await self.loop.ask(owned):
            assert time.monotonic() < deadline, f"{num_owned} blocks are still owned"
            await asyncio.sleep(0.01)


@asynccontextmanager
async def kv_worker(
    engine: KVEngine | None = None, lease_seconds: float = 10.0, engines: dict[str, TransferEngine] | None = None
) -> AsyncIterator[KVWorker]:
    engine = engine or KVEngine()
    loop = EngineLoop(cast(Engine, engine), lambda outcome: None, lambda: None)
    loop.start()
    engines = engines or {"grpc": GrpcEngine(engine.pool)}
    offers = Offers(loop, lease_seconds)
    servicer = TransferServicer()
    servicer.attach(offers, engine.pool, layout_of(engine.pool), engines)
    server = RpcServer("127.0.0.1:0", configure("test", None))
    register: Any = transfer_pb2_grpc.add_TransferServicer_to_server
    server.add("outrider.v1.Transfer", register, servicer)
    await server.start()
    fetcher = Fetcher(loop, layout_of(engine.pool), engines)
    try:
        yield KVWorker(engine, loop, offers, servicer, server, fetcher, engines)
    finally:
        engine.gate.set()
        await fetcher.close()
        for each in engines.values():
            await each.close()
        await server.stop()
        loop.stop()


def note_import_turns(engine: KVEngine, loop: EngineLoop, monkeypatch: pytest.MonkeyPatch) -> dict[str, int | None]:
    """In which turn of the loop something arrived in the pool, and in which an import ended: at first, by name."""
    imports = engine.scheduler.imports
    turns: dict[str, int | None] = {}
    for name in ("arrived", "end"):
        method = getattr(imports, name)

        def note(*arguments: Any, name: str = name, method: Any = method) -> None:
            turns.setdefault(name, loop.turn)
            method(*arguments)

        monkeypatch.setattr(imports, name, note)
    return turns
