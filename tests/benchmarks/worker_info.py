"""What a worker of a local stack says of itself."""

from __future__ import annotations

from outrider.v1 import draft_pb2_grpc, target_pb2_grpc, worker_pb2

from services.cli.stack import Stack
from shared.rpc.channel import connect


async def worker_info(stack: Stack, name: str) -> worker_pb2.WorkerInfo:
    """Of the process of that name, "draft" or a target worker."""
    async with connect(stack.processes[name].address) as channel:
        stub = draft_pb2_grpc.DrafterStub(channel) if name == "draft" else target_pb2_grpc.TargetStub(channel)
        info: worker_pb2.WorkerInfo = await stub.GetWorkerInfo(worker_pb2.GetWorkerInfoRequest())
    return info
