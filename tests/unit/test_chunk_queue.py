"""Output between generation and clients that read at once, later, too slowly, or never."""

from __future__ import annotations

import asyncio

import pytest
from outrider.v1 import inference_pb2

from services.router.clients import chunk_queue
from services.router.clients.chunk_queue import ChunkQueue
from shared.rpc.errors import Aborted

SIZE = 1000


def chunk(index: int) -> inference_pb2.GenerateResponse:
    """A chunk that counts as SIZE bytes."""
    made = inference_pb2.GenerateResponse(index=1 + index)
    made.text = "x" * (SIZE - chunk_queue._CHUNK_BYTES - made.ByteSize() - 3)
    assert made.ByteSize() + chunk_queue._CHUNK_BYTES == SIZE
    return made


class Client:
    """Takes a chunk whenever `read` is called, and those that come while `reads` is set."""

    def __init__(self) -> None:
        self.got: list[int] = []
        self.reads = asyncio.Event()
        self.writing = asyncio.Event()

    async def write(self, chunk: inference_pb2.GenerateResponse) -> None:
        self.writing.set()
        await self.reads.wait()
        self.got.append(chunk.index - 1)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_queue, "_MAX_QUEUED_BYTES", 10 * SIZE)


async def test_all_that_fits_comes_in_order_however_late_it_is_read() -> None:
    queue, client = ChunkQueue(), Client()
    writing = asyncio.create_task(queue.write_to(client.write))
    await asyncio.sleep(0)
    for index in range(10):
        queue.put(chunk(index))
    queue.end()
    await client.writing.wait()
    assert not writing.done()
    client.reads.set()
    await writing
    assert client.got == list(range(10))


async def test_what_was_read_makes_room() -> None:
    queue, client = ChunkQueue(), Client()
    client.reads.set()
    writing = asyncio.create_task(queue.write_to(client.write))
    for index in range(100):
        queue.put(chunk(index))
        # Put, woken, written.
        for _ in range(3):
            await asyncio.sleep(0)
        assert len(client.got) == index + 1
    queue.end()
    await writing
    assert client.got == list(range(100))


@pytest.mark.parametrize("writing_already", [True, False])
async def test_one_byte_too_many_ends_it_at_once_and_nothing_is_kept(writing_already: bool) -> None:
    queue, client = ChunkQueue(), Client()
    writing = asyncio.create_task(queue.write_to(client.write))
    if writing_already:
        queue.put(chunk(0))
        await client.writing.wait()
    for index in range(writing_already, 11):
        assert not writing.done()
        queue.put(chunk(index))
    assert not queue._chunks
    queue.put(chunk(11))
    assert not queue._chunks
    with pytest.raises(Aborted, match=f"too slow: more than {10 * SIZE} bytes wait"):
        await writing
    assert client.got == []


async def test_a_write_that_takes_too_long_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_queue, "_WRITE_SECONDS", 0.01)
    queue, client = ChunkQueue(), Client()
    for index in range(3):
        queue.put(chunk(index))
    with pytest.raises(Aborted, match=r"read nothing for 0\.01 s"):
        await queue.write_to(client.write)
    assert not queue._chunks
    assert client.got == []


async def test_each_write_has_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many in a row take longer than one may; one behind a pause that is longer begins anew, and is ended."""
    monkeypatch.setattr(chunk_queue, "_WRITE_SECONDS", 0.3)
    queue, client, paused = ChunkQueue(), Client(), asyncio.Event()

    async def write_slowly(chunk: inference_pb2.GenerateResponse) -> None:
        await asyncio.sleep(0.05)
        if chunk.index - 1 == 10:
            await asyncio.Event().wait()
        client.got.append(chunk.index - 1)
        if len(client.got) == 9:
            paused.set()

    writing = asyncio.create_task(queue.write_to(write_slowly))
    for index in range(9):
        queue.put(chunk(index))
    await paused.wait()
    await asyncio.sleep(0.35)
    queue.put(chunk(9))
    queue.put(chunk(10))
    with pytest.raises(Aborted, match=r"read nothing for 0\.3 s"):
        await writing
    assert client.got == list(range(10))


async def test_waiting_for_generation_has_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_queue, "_WRITE_SECONDS", 0.0)
    queue, client = ChunkQueue(), Client()
    writing = asyncio.create_task(queue.write_to(client.write))
    await asyncio.sleep(0.02)
    assert not writing.done()
    queue.end()
    await writing


@pytest.mark.parametrize("error", [TimeoutError("of the write's own"), ConnectionError("gone")])
async def test_what_a_write_raises_passes(error: Exception) -> None:
    async def write(_: object) -> None:
        raise error

    queue = ChunkQueue()
    queue.put(chunk(0))
    with pytest.raises(type(error), match=str(error)):
        await queue.write_to(write)


async def test_what_is_sent_to_workers_behind_a_chunk_is_written_before_it() -> None:
    queue, sent, written = ChunkQueue(), asyncio.Event(), []

    async def worker() -> None:
        await sent.wait()
        written.append("worker")

    async def client(_: inference_pb2.GenerateResponse) -> None:
        written.append("client")

    tasks = [asyncio.create_task(worker()), asyncio.create_task(queue.write_to(client))]
    await asyncio.sleep(0)
    queue.put(chunk(0))
    sent.set()
    queue.end()
    await asyncio.gather(*tasks)
    assert written == ["worker", "client"]
