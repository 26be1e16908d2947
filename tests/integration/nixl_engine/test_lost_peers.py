"""What becomes of a read by nixl whose peer stops, dies, is new or was not read from for long."""

from __future__ import annotations

import asyncio
import signal

import pytest

from shared.transfer.engine import TransferFailed
from shared.transfer.nixl import peer as nixl_peer
from tests.support.nixl_worker import ALL, Reader, Start, Worker, assert_read, needs_nixl, new_pool, within_bound

pytestmark = pytest.mark.timeout(120)


@needs_nixl
async def test_a_worker_restarted_under_the_same_address(start: Start, reader: Reader) -> None:
    old, pool = start(1), new_pool()
    engine = reader(pool)
    old_peer = await engine.peer("worker:1", old.metadata)
    await old_peer.read(b"", ALL[:10])
    old.kill()
    new = start(2)
    peer = await engine.peer("worker:1", new.metadata)
    assert peer is not old_peer
    await peer.read(b"", ALL[:20])
    assert_read(new.pool, pool, ALL[:20])
    with pytest.raises(TransferFailed):
        await within_bound(old_peer.read(b"", ALL[20:]))
    with pytest.raises(TransferFailed):
        await within_bound(engine.peer("worker:1", old.metadata))
    assert await engine.peer("worker:1", new.metadata) is peer
    await peer.read(b"", ALL[:20])
    assert_read(new.pool, pool, ALL[:20])


@needs_nixl
@pytest.mark.parametrize("seconds", [0.0, 0.05, 0.2])
async def test_a_peer_killed_in_mid_read(seconds: float, shared_worker: Worker, start: Start, reader: Reader) -> None:
    worker, pool = start(2), new_pool()
    engine = reader(pool)
    peer, other = await engine.peer("w:1", worker.metadata), await engine.peer("w:2", shared_worker.metadata)

    async def read_on() -> None:
        while True:
            await peer.read(b"", ALL)

    reading = [asyncio.create_task(within_bound(read_on())) for _ in range(2)]
    await asyncio.sleep(seconds)
    worker.kill()
    for task in reading:
        with pytest.raises(TransferFailed):
            await task
    pool.data.zero_()
    await other.read(b"", ALL)
    assert_read(shared_worker.pool, pool, ALL)


@needs_nixl
async def test_a_stopped_worker_can_be_read_from(start: Start, reader: Reader) -> None:
    """Its memory is there, and its process not needed."""
    worker, pool = start(), new_pool()
    peer = await reader(pool).peer("worker:1", worker.metadata)
    # UCX may settle on another way once more after its first transfer, which takes both processes.
    await peer.read(b"", ALL)
    pool.data.zero_()
    worker.send_signal(signal.SIGSTOP)
    await within_bound(peer.read(b"", ALL))
    assert_read(worker.pool, pool, ALL)


@needs_nixl
async def test_a_worker_that_does_not_answer_at_first(
    monkeypatch: pytest.MonkeyPatch, start: Start, reader: Reader
) -> None:
    monkeypatch.setattr(nixl_peer, "_CONNECT_SECONDS", 0.5)
    worker, pool = start(), new_pool()
    engine = reader(pool)
    worker.send_signal(signal.SIGSTOP)
    asking = [asyncio.create_task(engine.peer("worker:1", worker.metadata)) for _ in range(3)]
    await asyncio.sleep(0.1)
    asking[0].cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking[0]
    for task in asking[1:]:
        with pytest.raises(TransferFailed, match="no answer within"):
            await task
    worker.send_signal(signal.SIGCONT)
    await asyncio.sleep(0.5)
    assert not pool.data.any()
    monkeypatch.undo()
    peer = await engine.peer("worker:1", worker.metadata)
    await peer.read(b"", ALL)
    assert_read(worker.pool, pool, ALL)


@needs_nixl
async def test_a_worker_that_no_direct_way_leads_to(
    monkeypatch: pytest.MonkeyPatch, start: Start, reader: Reader
) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    worker, pool = start(), new_pool()
    engine = reader(pool)
    for _ in range(3):
        with pytest.raises(TransferFailed):
            await engine.peer("worker:1", worker.metadata)
    assert worker.process.is_alive()


@needs_nixl
async def test_peers_not_read_from_are_forgotten(
    monkeypatch: pytest.MonkeyPatch, shared_worker: Worker, start: Start, reader: Reader
) -> None:
    pool, other = new_pool(), start(2)
    engine = reader(pool)
    idle = await engine.peer("worker:1", shared_worker.metadata)
    await idle.read(b"", ALL)
    await engine.peer("worker:2", other.metadata)
    await idle.read(b"", ALL)
    monkeypatch.setattr(nixl_peer, "_IDLE_SECONDS", 0.0)
    await engine.peer("worker:2", other.metadata)
    with pytest.raises(TransferFailed, match="given up"):
        await idle.read(b"", ALL)
    pool.data.zero_()
    await (await engine.peer("worker:1", shared_worker.metadata)).read(b"", ALL)
    assert_read(shared_worker.pool, pool, ALL)
