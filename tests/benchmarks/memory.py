"""What the workers of a stack hold in memory, beside what they must."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open

from services.cli.stack import Stack
from tests.benchmarks.model_pair import Pair
from tests.benchmarks.worker_info import worker_info

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Memory:
    """MiB of a process: all that is resident, the weights in it, and the KV cache, of which as much is resident
    as was ever used."""

    resident: float
    weights: float
    kv_cache: float


async def measure_memory(stack: Stack, pair: Pair) -> dict[str, Memory]:
    """By process, of the target worker and the draft, that serve the pair in bf16; the KV cache is the model's own."""
    sources = {"target-0": [pair.target], "draft": [pair.draft]}
    if "draft" not in stack.processes:
        sources = {"target-0": [pair.target, pair.draft]}
    found = {}
    for name, models in sources.items():
        pid = stack.processes[name].pid
        assert pid is not None
        info = await worker_info(stack, name)
        weights, kv_cache = 2 * sum(map(_num_weights, models)), info.num_blocks * info.block_bytes
        found[name] = Memory(resident(pid), weights / _MIB, kv_cache / _MIB)
    return found


def resident(pid: int) -> float:
    """MiB."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1024


def _num_weights(folder: Path) -> int:
    """Of a checkpoint; tied ones are in it once."""
    total = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="numpy") as file:
            for name in file.keys():  # noqa: SIM118, it is no mapping
                total += math.prod(file.get_slice(name).get_shape())
    return total
