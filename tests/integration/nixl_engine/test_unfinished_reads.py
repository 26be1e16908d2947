"""Reads by nixl that are cancelled, do not end, or are under way when something else fails or closes."""

from __future__ import annotations

import asyncio
import signal

import pytest
import torch

from shared.transfer.engine import TransferFailed
from shared.transfer.nixl import peer as nixl_peer
from tests.support.nixl_worker import (
    ALL,
    NUM_BLOCKS,
    Reader,
    Start,
    Worker,
    assert_read,
    needs_nixl,
    new_pool,
    within_bound,
)

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes go over TCP, as nobody should have it: then a peer that stops does stop a read."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.setenv("UCX_PROTO_EMULATION_ENABLE", "y")


@needs_nixl
async def test_cancelled_in_mid_read(monkeypatch: pytest.MonkeyPatch, shared_worker: Worker, reader: Reader) -> None:
    pool = new_pool()
    monkeypatch.setattr(nixl_peer, "_PART_BYTES", pool.block_num_bytes)
    peer = await reader(pool).peer("worker:1", shared_worker.metadata)
    reading = asyncio.create_task(peer.read(b"", ALL))
    while not pool.data[NUM_BLOCKS // 4].any():  # noqa: ASYNC110 - a transfer does not tell how far it is
        await asyncio.sleep(0)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    written = pool.data.view(torch.uint8).clone()
    assert not written[-1].any(), "read to its end"
    await asyncio.sleep(0.2)
    assert torch.equal(written, pool.data.view(torch.uint8))
    await peer.read(b"", ALL)
    assert_read(shared_worker.pool, pool, ALL)


@needs_nixl
@pytest.mark.usefixtures("over_tcp")
async def test_cancelled_it_still_ends_before_it_is_over(start: Start, reader: Reader) -> None:
    worker, pool = start(), new_pool()
    peer = await reader(pool).peer("worker:1", worker.metadata)
    await peer.read(b"", ALL[:1])
    worker.send_signal(signal.SIGSTOP)
    reading = asyncio.create_task(peer.read(b"", ALL))
    for _ in range(3):
        await asyncio.sleep(0.1)
        reading.cancel()
    await asyncio.sleep(0.5)
    assert not reading.done()
    worker.send_signal(signal.SIGCONT)
    with pytest.raises(asyncio.CancelledError):
        await within_bound(reading)  # type: ignore[arg-type]
    assert_read(worker.pool, pool, ALL)


@needs_nixl
@pytest.mark.usefixtures("over_tcp")
@pytest.mark.parametrize("cancel", [False, True], ids=["waited for", "cancelled"])
async def test_a_read_that_does_not_end(
    monkeypatch: pytest.MonkeyPatch, cancel: bool, shared_worker: Worker, start: Start, reader: Reader
) -> None:
    """It fails, and whatever its peer does later, nothing is written."""
    monkeypatch.setattr(nixl_peer, "_PART_SECONDS", 1.0)
    worker, other, pool = start(), start(2), new_pool()
    engine = reader(pool)
    peer, another = await engine.peer("worker:1", worker.metadata), await engine.peer("worker:2", other.metadata)
    metadata = engine.metadata
    worker.send_signal(signal.SIGSTOP)
    reading = asyncio.create_task(peer.read(b"", ALL))
    await asyncio.sleep(0.2)
    if cancel:
        reading.cancel()
    with pytest.raises(asyncio.CancelledError if cancel else TransferFailed):
        await within_bound(reading)  # type: ignore[arg-type]
    pool.data.zero_()
    worker.send_signal(signal.SIGCONT)
    await asyncio.sleep(1)
    assert not pool.data.any()
    # Everybody has to be asked for again; whoever reads from us has to know, too.
    assert engine.metadata != metadata
    with pytest.raises(TransferFailed):
        await another.read(b"", ALL)
    # The woken worker still pushes what it was asked for: this may take its time.
    monkeypatch.setattr(nixl_peer, "_PART_SECONDS", 30.0)
    await (await engine.peer("worker:2", other.metadata)).read(b"", ALL)
    assert_read(other.pool, pool, ALL)


@needs_nixl
@pytest.mark.usefixtures("over_tcp")
async def test_closing_ends_what_is_under_way(start: Start, reader: Reader) -> None:
    worker, pool = start(), new_pool()
    engine = reader(pool)
    peer = await engine.peer("worker:1", worker.metadata)
    worker.send_signal(signal.SIGSTOP)
    reading = asyncio.create_task(peer.read(b"", ALL))
    await asyncio.sleep(0.2)
    await engine.close()
    with pytest.raises(TransferFailed, match="closed"):
        await reading
    worker.send_signal(signal.SIGCONT)
    await asyncio.sleep(0.5)
    assert not pool.data.any()
    for again in (peer.read(b"", ALL), engine.peer("worker:1", worker.metadata)):
        with pytest.raises(TransferFailed):
            await again
    await engine.close()


@needs_nixl
async def test_a_call_that_fails_ends_no_other(
    caplog: pytest.LogCaptureFixture, shared_worker: Worker, reader: Reader
) -> None:
    pool = new_pool()
    engine = reader(pool)
    peer = await engine.peer("worker:1", shared_worker.metadata)

    def fail() -> None:
        raise ZeroDivisionError("no transfer's failure")

    engine._thread.call(fail)
    await within_bound(peer.read(b"", ALL))
    assert_read(shared_worker.pool, pool, ALL)
    assert "no transfer's failure" in caplog.text
