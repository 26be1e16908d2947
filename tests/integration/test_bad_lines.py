"""KV over a line that is late, goes dead or is cut, at any moment: it comes whole, or the rest is computed in time."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from shared.engine.sequence import Sequence
from shared.transfer import fetch as fetch_module
from shared.transfer.engine import TransferFailed
from tests.support.kv_engine import KVEngine, KVWorker, kv_worker
from tests.support.machine import BLOCK_SIZE, ROOT, VOCAB_SIZE, decoded, new_sequence
from tests.support.proxy import Proxy
from tests.support.router_stack import until

pytestmark = pytest.mark.timeout(60)

TICKET = b"t" * 16
PROMPT = [7 * i % VOCAB_SIZE for i in range(6 * BLOCK_SIZE + 3)]
FULL_TOKENS = 6 * BLOCK_SIZE
# A line that says nothing is given up after this much, and then a little for a busy machine.
SILENCE_SECONDS = 0.5
ENDED_SECONDS = 20.0

Harm = Callable[[Proxy], None]


@asynccontextmanager
async def ends() -> AsyncIterator[tuple[KVWorker, KVWorker, Proxy]]:
    """The worker that has the KV, the one that needs it, and the line from the second to the first."""
    async with kv_worker(KVEngine(64, 512), lease_seconds=1.0) as p, kv_worker(KVEngine(64, 512)) as d:
        line = Proxy(p.address)
        await line.start()
        try:
            yield p, d, line
        finally:
            await line.close()


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch_module, "_SILENCE_SECONDS", SILENCE_SECONDS)
    monkeypatch.setattr(fetch_module, "_RENEW_SECONDS", SILENCE_SECONDS / 5)


async def fetch_and_go_on(d: KVWorker, address: str) -> tuple[Exception | None, Sequence]:
    """Why nothing came, if so, and the sequence that went on behind the fetch."""
    kv_import = await d.loop.ask(lambda: d.engine.scheduler.begin_import(PROMPT, ROOT))
    failure: Exception | None = None
    try:
        async with asyncio.timeout(ENDED_SECONDS):
            await d.fetcher.fetch(kv_import, address, TICKET)
    except TransferFailed as error:
        failure = error
    sequence = new_sequence(PROMPT, 12)
    sequence.num_steps = 99
    sequence.kv_import = kv_import

    def begin() -> None:
        d.engine.scheduler.add(sequence)
        d.engine.scheduler.imports.drop(kv_import)

    await d.loop.ask(begin)
    await until(lambda: sequence.finish is not None, "it ends")
    assert sequence.token_ids == decoded(PROMPT, sequence.params)
    await d.until_idle()
    return failure, sequence


async def test_a_late_line_takes_longer() -> None:
    async with ends() as (p, d, line):
        line.delay_seconds = 0.02
        await p.add(new_sequence(PROMPT, 1), TICKET)
        failure, sequence = await fetch_and_go_on(d, line.address)
        assert failure is None
        # All full blocks: the last token is computed for its logits.
        assert sequence.num_cached_tokens == FULL_TOKENS
        await p.until_idle()


@pytest.mark.parametrize("harm", [Proxy.stall, Proxy.cut], ids=["dead", "cut"])
@pytest.mark.parametrize("when", ["before it begins", "while it is computed", "while it is read"])
async def test_a_line_that_fails_costs_no_more_than_its_deadline(
    harm: Harm, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with ends() as (p, d, line):
        reading, go_on = threading.Event(), threading.Event()
        read = p.engine.pool.read_block

        def slow(block: int) -> bytes:
            reading.set()
            go_on.wait()
            return read(block)

        monkeypatch.setattr(p.engine.pool, "read_block", slow)
        if when == "while it is computed":
            p.engine.gate.clear()
        adding = asyncio.create_task(p.add(new_sequence(PROMPT, 1), TICKET))
        if when == "before it begins":
            # Nobody answers at all.
            line.stall()
            harm(line)
        going_on = asyncio.create_task(fetch_and_go_on(d, line.address))
        if when == "while it is read":
            await asyncio.to_thread(reading.wait)
            harm(line)
        elif when == "while it is computed":
            await until(lambda: bool(p.offers._being_read), "the fetch has begun")
            harm(line)
        try:
            failure, sequence = await going_on
            assert failure is not None
            assert sequence.num_cached_tokens < FULL_TOKENS
        finally:
            go_on.set()
            p.engine.gate.set()
        await adding
        # What was held for a reader that is gone goes when its line does, or with the lease.
        await p.until_idle()
