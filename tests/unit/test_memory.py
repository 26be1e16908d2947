"""How large a KV cache is where no setting says it, with made-up machines."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shared.engine.kv_pool import KVPool, KVShape
from shared.engine.memory import (
    DeviceMemory,
    available_memory,
    device_cache_bytes,
    host_cache_bytes,
    measure_device,
    return_free_memory,
)

GIB = 1 << 30


def gib(total: float, free: float, own: float, step: float) -> DeviceMemory:
    return DeviceMemory(*(int(part * GIB) for part in (total, free, own, step)))


@pytest.mark.parametrize(
    ("device", "share", "expected"),
    [
        (gib(80, 63, 16, 2), 0.9, 53),  # 72, less 17 in use and a step
        (gib(80, 43, 16, 2), 0.9, 33),  # beside somebody else's 20
        (gib(80, 63, 3, 1), 0.2, 12),  # a drafter: 16 of its own, less weights and a step
        (gib(80, 10, 3, 1), 0.2, 1),  # 72 are nearly in use
        (gib(80, 4, 3, 1), 0.9, -5),
        (gib(16, 1, 15, 1), 0.9, -1.6),
    ],
)
def test_a_device_is_filled_to_the_share_and_never_beyond_nine_tenths(
    device: DeviceMemory, share: float, expected: float
) -> None:
    assert device_cache_bytes(device, share) == pytest.approx(expected * GIB, abs=2)


def test_an_8b_llama_on_a_large_device_gets_more_than_its_context() -> None:
    llama = KVPool.block_bytes(KVShape(32, 8, 128, 128), 16, torch.bfloat16)
    blocks = device_cache_bytes(gib(80, 63, 16, 2), 0.9) // llama
    assert blocks * 16 > 3 * 131072


@pytest.mark.parametrize(("available", "share", "expected"), [(8, 0.9, 3.6), (8, 0.2, 0.8), (64, 0.9, 4), (0, 0.9, 0)])
def test_a_host_gives_half_the_share_and_at_most_4_gib(available: int, share: float, expected: float) -> None:
    assert host_cache_bytes(available * GIB, share) == pytest.approx(expected * GIB, abs=1)


def test_workers_of_a_stack_together_leave_half_of_the_memory() -> None:
    shares = [0.2, 0.35, 0.35]
    assert sum(host_cache_bytes(6 * GIB, share) for share in shares) <= 3 * GIB


def test_a_step_is_measured_beside_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a CUDA allocator of our own: 16 GiB of weights, 1 of other use, and a step that needs 2 for a moment."""
    state = {"allocated": 16, "peak": 40, "cached": 0}

    def run_step() -> None:
        state["peak"] = max(state["peak"], state["allocated"] + 2)
        state["cached"] = 2

    fake = SimpleNamespace(
        memory_allocated=lambda device: state["allocated"] * GIB,
        max_memory_allocated=lambda device: state["peak"] * GIB,
        reset_peak_memory_stats=lambda device: state.update(peak=state["allocated"]),
        synchronize=lambda device: None,
        empty_cache=lambda: state.update(cached=0),
        mem_get_info=lambda device: ((80 - 1 - state["allocated"] - state["cached"]) * GIB, 80 * GIB),
    )
    monkeypatch.setattr(torch, "cuda", fake)
    assert measure_device(torch.device("cuda"), run_step) == gib(80, 63, 16, 2)


def machine(root: Path, available_gib: int, cgroup: str, files: dict[str, Any]) -> Path:
    """A root folder of /proc and /sys as Linux shows them."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(
        f"MemTotal: 99 kB\nMemAvailable:   {available_gib << 20} kB\nHugePages_Free: 0\n"
    )
    (root / "proc/self/cgroup").write_text(cgroup)
    for name, content in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")
    return root


def test_without_limits_it_is_what_the_machine_has(tmp_path: Path) -> None:
    files = {"a/memory.max": "max", "a/memory.current": 5, "memory/b/memory.limit_in_bytes": 9223372036854771712}
    files |= {"memory/b/memory.usage_in_bytes": 7, "memory/b/memory.stat": "cache 3"}
    assert available_memory(machine(tmp_path, 10, "4:cpu,memory:/b\n1:name=systemd:/\n0::/a\n", files)) == 10 * GIB


@pytest.mark.parametrize("cgroup", ["0::/pod/worker\n", "0::/\n", "0::/seen/from/outside\n"])
def test_a_containers_limit_counts_wherever_it_stands(tmp_path: Path, cgroup: str) -> None:
    where = "pod/" if "pod" in cgroup else ""
    files = {f"{where}memory.max": 4 * GIB, f"{where}memory.current": 3 * GIB, "pod/worker/memory.max": "max"}
    # A gibibyte of what is in use is files read, which can be dropped: weights were loaded just now.
    files[f"{where}memory.stat"] = f"anon {2 * GIB}\ninactive_file {GIB}"
    assert available_memory(machine(tmp_path, 10, cgroup, files)) == 2 * GIB


def test_a_limit_of_the_first_version_counts(tmp_path: Path) -> None:
    files: dict[str, Any] = {"memory/a/memory.limit_in_bytes": 4 * GIB, "memory/a/memory.usage_in_bytes": 5 * GIB}
    files["memory/a/memory.stat"] = "total_inactive_file 7"
    assert available_memory(machine(tmp_path, 10, "9:memory:/a\n0::/\n", files)) == 0


def test_this_machine_has_some() -> None:
    assert 0 < available_memory() < 1 << 50


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="tells of memory in another way")
def test_a_pool_takes_memory_only_as_it_is_used() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    shape, before = KVShape(2, 2, 64, 64), resident()
    pool = KVPool(shape, GIB // KVPool.block_bytes(shape, 16, torch.bfloat16), 16, torch.bfloat16, torch.device("cpu"))
    assert pool.data.nbytes == GIB
    assert pool.data.data_ptr() % 64 == 0
    assert resident() - before < GIB // 8
    pool.data[::1000] = 1
    assert pool.data.is_contiguous()
    assert pool.data[1:1000:7].count_nonzero() == 0
    assert pool.data[-1 - (pool.num_blocks - 1) % 1000].sum() == math.prod(pool.data.shape[1:])
    pool.commit()
    assert resident() - before >= GIB
    assert pool.data[::1000].count_nonzero() == 0


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="tells of memory in another way")
def test_free_memory_is_returned() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    # Too small to be mapped each by itself, and the last one keeps the heap from shrinking.
    parts = [bytearray(64 * 1024) for _ in range(4096)]
    before, last = resident(), parts.pop()
    parts.clear()
    return_free_memory()
    assert before - resident() > GIB // 8
    assert len(last) == 64 * 1024
