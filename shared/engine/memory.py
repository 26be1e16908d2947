"""How much memory a KV cache gets where no setting says it: what is free, here and in this container, and a share."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

# A CUDA device is never filled beyond this: other libraries' memory and fragmentation need room too.
_DEVICE_LIMIT = 0.9
# RAM is not the worker's alone, and what is free now may be others' page cache soon.
_HOST_SHARE = 0.5
_MAX_HOST_BYTES = 4 << 30
# Of madvise(2), since Linux 5.14.
_MADV_POPULATE_WRITE = 23


class DeviceMemory(NamedTuple):
    """Bytes of a CUDA device: all there is, what nobody uses, what this process holds between steps, and
    what its largest step takes beside that."""

    total: int
    free: int
    own: int
    step: int


def device_cache_bytes(memory: DeviceMemory, share: float) -> int:
    """What a KV cache may take, 0 or less if nothing: the worker stays within `share` of the device, and all
    that run there within nine tenths."""
    used = memory.total - memory.free
    room = min(share * memory.total - memory.own, _DEVICE_LIMIT * memory.total - used)
    return int(room) - memory.step


def host_cache_bytes(available: int, share: float) -> int:
    """What a KV cache in RAM may take of `available` bytes: half of the worker's `share`, at most 4 GiB."""
    return min(int(_HOST_SHARE * share * available), _MAX_HOST_BYTES)


def measure_device(device: torch.device, run_largest_step: Callable[[], object]) -> DeviceMemory:
    """Takes the measure of a CUDA device on which this process has loaded its model and nothing else."""
    own = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run_largest_step()
    torch.cuda.synchronize(device)
    step = torch.cuda.max_memory_allocated(device) - own
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return DeviceMemory(total, free, own, step)


def available_memory(root: Path = Path("/")) -> int:
    """Bytes of RAM that this process can still get: what the machine has, within its container's limits."""
    try:
        machine = _fields(root / "proc/meminfo")["MemAvailable:"] * 1024
    except (OSError, KeyError):  # not Linux: no way to ask without a library
        machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(0, min([machine, *_cgroup_headrooms(root)]))


def populate(address: int, num_bytes: int) -> None:
    """Has the system find the memory of so many bytes from there on, whatever is in them, which stays as it is.

    Raises OSError where it cannot: before Linux 5.14, elsewhere, or with no memory left.
    """
    process = ctypes.CDLL(None, use_errno=True)
    page = mmap.PAGESIZE
    first = address // page * page
    size = -(-(address + num_bytes - first) // page) * page
    if not sys.platform.startswith("linux") or process.madvise(
        ctypes.c_void_p(first), ctypes.c_size_t(size), _MADV_POPULATE_WRITE
    ):
        raise OSError(ctypes.get_errno(), "madvise(MADV_POPULATE_WRITE) failed")


def return_free_memory() -> None:
    """Gives back to the system what the allocator keeps of freed memory: much, once weights have been laid out anew."""
    gc.collect()
    process = ctypes.CDLL(None)
    if hasattr(process, "MallocExtension_ReleaseFreeMemory"):  # tcmalloc, where it is preloaded
        process.MallocExtension_ReleaseFreeMemory()
    elif hasattr(process, "malloc_trim"):
        process.malloc_trim(0)


def _cgroup_headrooms(root: Path) -> Iterator[int]:
    """What each memory limit on this process leaves: those of its control group and of all groups above it.

    Page cache that can be dropped does not count as used. Inside a container the group's own folder may be
    the mounted root, and the path that the process is told may not exist: such folders are passed over.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # version 2
            mount, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            mount = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        group = mount / path.lstrip("/")
        for folder in (group, *group.parents):
            if folder.is_relative_to(mount):
                try:
                    limit, used = (int((folder / name).read_text()) for name in names[:2])
                    yield limit - used + _fields(folder / "memory.stat").get(names[2], 0)
                except (OSError, ValueError):  # no limit ("max"), or no such folder
                    continue


def _fields(path: Path) -> dict[str, int]:
    """The numbers of a file whose lines each hold a name and a number."""
    return {words[0]: int(words[1]) for words in map(str.split, path.read_text().splitlines()) if len(words) > 1}
