"""Where kernels are launched: on the current device, which is not always that of what they are given."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor


def device_of(x: Tensor) -> AbstractContextManager[None]:
    """Makes it the tensor's; nothing of one on the CPU."""
    make: Any = torch.cuda.device_of
    context: AbstractContextManager[None] = make(x)
    return context
