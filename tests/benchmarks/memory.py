"""What the workers of a stack hold in memory, beside what they must."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import grpc.aio
from outrider.v1 import draft_pb2_grpc, target_pb2_grpc, worker_pb2
from safetensors import safe_open

from services.cli.stack import Stack
from shared.rpc.channel import connect
from tests.benchmarks.model_pair import Pair

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Memory:
    """MiB of a process: all that is resident, the weights in it, and the KV cache, of which as much is resident
    as was ever used."""

    resident: float
    weights: float
    kv_cache: float


async def measure_memory(stack: Stack, pair: Pair) -> dict[str, Memory]:
    """By process, of the target worker and the draft, that serve the pair in bf16."""
    found = {}
    for name, source in (("target-0", pair.target), ("draft", pair.draft)):
        process = stack.processes[name]
        assert process.pid is not None
        async with connect(process.address) as channel:
            info = await _info(channel, name)
        weights, kv_cache = 2 * _num_weights(source), info.num_blocks * info.block_bytes
        found[name] = Memory(resident(process.pid), weights / _MIB, kv_cache / _MIB)
    return found


def resident(pid: int) -> float:
    """MiB."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1024


async def _info(channel: grpc.aio.Channel, name: str) -> worker_pb2.WorkerInfo:
    stub = draft_pb2_grpc.DrafterStub(channel) if name == "draft" else target_pb2_grpc.TargetStub(channel)
    info: worker_pb2.WorkerInfo = await stub.GetWorkerInfo(worker_pb2.GetWorkerInfoRequest())
    return info


def _num_weights(folder: Path) -> int:
    """Of a checkpoint; tied ones are in it once."""
    total = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="numpy") as file:
            for name in file.keys():  # noqa: SIM118, it is no mapping
                total += math.prod(file.get_slice(name).get_shape())
    return total
