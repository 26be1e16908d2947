"""Whether there are Triton kernels for a model, and what a step is to them."""

from __future__ import annotations

import functools
import importlib.util
import logging
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from shared.engine.attention.grouping import Indices

if TYPE_CHECKING:
    from shared.engine.attention.batch import AttentionBatch
    from shared.engine.cuda.step import CudaStep, WindowTensors

logger = logging.getLogger(__name__)

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_LEAST_CAPABILITY = (8, 0)


class TritonKernels:
    """Who has none of this needs no Triton: it is imported with the first step."""

    def step(self, batch: AttentionBatch) -> CudaStep:
        """One that uploads what its layers need when they first need it."""
        from shared.engine.cuda.described import DescribedStep
        from shared.engine.cuda.step import CudaStep, Launch, WindowTensors, num_programs

        step, pool = DescribedStep(batch), batch.pool
        device = pool.data.device
        places, tables, positions = _upload(device, step.places, batch.tables, batch.positions)

        @functools.cache
        def of_window(fold: int, window: int | None) -> WindowTensors:
            plan = step.plan(fold, window)
            counts = np.array([len(work.items) for work in plan.work])
            first_parts, ancestors, count, *items = _upload(
                device,
                plan.first_parts,
                step.ancestors(window),
                counts,
                *(work.items.reshape(-1) for work in plan.work),
            )
            launches = [
                Launch(
                    work.num_rows,
                    min(len(work.items) * pool.shape.num_kv_heads, num_programs(device)),
                    count[i:],
                    items[i],
                )
                for i, work in enumerate(plan.work)
            ]
            return WindowTensors(launches, first_parts, plan.num_parts, ancestors)

        return CudaStep(pool, batch.num_tokens, places, tables, positions, step.has_trees, of_window)


@functools.cache
def load_triton() -> TritonKernels | None:
    """None, and a line in the log, where Triton is not installed."""
    if importlib.util.find_spec("triton") is None:
        logger.warning("no kernels of its own for this device, PyTorch's serve: Triton is not installed")
        return None
    return TritonKernels()


def has_triton(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether there may be kernels for models of this type there: on NVIDIA's devices from Ampere on."""
    if device.type != "cuda" or dtype not in _DTYPES or torch.version.cuda is None:
        return False
    return torch.cuda.get_device_capability(device) >= _LEAST_CAPABILITY


def _upload(device: torch.device, *arrays: Indices) -> list[Tensor]:
    """All in one copy, on the device one behind the other."""
    whole = torch.from_numpy(np.concatenate(arrays)).to(device, non_blocking=True)
    return list(torch.split(whole, [len(array) for array in arrays]))
