"""Memory of a KV pool that is there before it is written."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import threading
from types import SimpleNamespace

import pytest
import torch

from shared.engine import commit_ahead
from shared.engine.block_pool import BlockPool
from shared.engine.commit_ahead import CommitAhead
from shared.engine.kv_pool import KVPool, KVShape
from shared.engine.memory import populate

MIB = 1 << 20
SHAPE = KVShape(2, 2, 64, 64)


@pytest.fixture(autouse=True)
def without_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit_ahead, "_REST", 0.0)


def can_populate() -> bool:
    try:
        populate(torch.zeros(MIB, dtype=torch.uint8).data_ptr(), MIB)
    except OSError:
        return False
    return True


needs_it = pytest.mark.skipif(not can_populate(), reason="before Linux 5.14")


def resident(data: torch.Tensor) -> float:
    """MiB of this tensor's pages that are there (``mincore``), whatever else the process takes and gives back; each
    end may be in a huge page of 2 MiB, which comes as a whole."""
    page = mmap.PAGESIZE
    first = -(-data.data_ptr() // page) * page
    num_pages = (data.data_ptr() + data.nbytes - first) // page
    flags = (ctypes.c_ubyte * num_pages)()
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mincore(ctypes.c_void_p(first), ctypes.c_size_t(num_pages * page), flags) == 0, ctypes.get_errno()
    return sum(flag & 1 for flag in flags) * page / MIB


def pool_of(num_bytes: int) -> KVPool:
    num_blocks = num_bytes // KVPool.block_bytes(SHAPE, 16, torch.bfloat16)
    return KVPool(SHAPE, num_blocks, 16, torch.bfloat16, torch.device("cpu"))


@needs_it
def test_what_is_populated_is_there_and_stays_as_it_is() -> None:
    pool = pool_of(64 * MIB)
    pool.data[5] = 7.0
    populate(pool.data.data_ptr() + 100, 32 * MIB)
    assert resident(pool.data) == pytest.approx(32, abs=4)
    assert bool((pool.data[5] == 7.0).all())
    assert pool.data.count_nonzero() == pool.data[5].numel()


def test_memory_that_is_nowhere_cannot_be_populated() -> None:
    with pytest.raises(OSError, match="MADV_POPULATE_WRITE"):
        populate(4096, MIB)


@needs_it
def test_so_much_is_kept_ahead_of_what_is_used_and_never_more() -> None:
    pool = pool_of(512 * MIB)
    ahead, size = CommitAhead(pool), pool.block_num_bytes

    def taken_at(num_used_mib: int) -> float:
        ahead.keep(num_used_mib * MIB // size)
        ahead.join()
        return resident(pool.data)

    assert taken_at(0) == pytest.approx(128, abs=4)
    assert taken_at(32) == pytest.approx(128, abs=4), "there is enough yet"
    assert taken_at(80) == pytest.approx(208, abs=4)
    assert taken_at(300) == pytest.approx(336, abs=4), "what was used meanwhile is there"
    assert taken_at(400) == pytest.approx(420, abs=4)
    assert taken_at(512) == pytest.approx(420, abs=4)
    assert pool.data.count_nonzero() == 0


@needs_it
def test_what_a_smaller_model_keeps_beside_it_is_there_too() -> None:
    pool = pool_of(64 * MIB)
    pool.add_beside(SHAPE, torch.bfloat16)
    ahead = CommitAhead(pool)
    ahead.keep(0)
    ahead.join()
    assert pool.beside is not None
    assert [resident(pool.data), resident(pool.beside.data)] == pytest.approx([64, 64], abs=4)


def test_where_it_cannot_be_had_nothing_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(address: int, num_bytes: int) -> None:
        raise OSError(22, "no such advice")

    monkeypatch.setattr(commit_ahead, "populate", fail)
    pool, ahead = pool_of(4 * MIB), CommitAhead(pool_of(4 * MIB))
    ahead.keep(0)
    ahead.join()
    pool.data[0] = 1.0
    assert bool((pool.data[0] == 1.0).all())


def test_without_a_thread_to_be_had_nothing_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    ahead = CommitAhead(pool_of(4 * MIB))
    monkeypatch.setattr(threading.Thread, "start", fail)
    ahead.keep(0)
    ahead.join()


@needs_it
def test_a_machine_that_stood_still_is_no_reason_to_rest_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    rests: list[float] = []
    times = itertools.count(step=60.0)
    monkeypatch.setattr(commit_ahead, "_REST", 4.0)
    clock = SimpleNamespace(perf_counter=lambda: next(times), sleep=rests.append)
    monkeypatch.setattr(commit_ahead, "time", clock)
    ahead = CommitAhead(pool_of(8 * MIB))
    ahead.keep(0)
    ahead.join()
    assert len(rests) == 4
    assert max(rests) <= 0.1


def test_blocks_that_were_used_are_used_again_before_others() -> None:
    blocks = BlockPool(100)
    for _ in range(50):
        blocks.release(blocks.allocate(3))
    assert blocks.num_used == 3
    held = blocks.allocate(10)
    assert blocks.num_used == 10
    blocks.register(held[9], b"a hash")
    blocks.release(held)
    assert 9 not in blocks.allocate(10)
    assert blocks.num_used == 11
