"""What a step's error says of the engine it came from."""

from __future__ import annotations

import torch


class EngineBroken(Exception):
    """The engine cannot be expected to compute anything right any more: its process has to start anew."""


def is_device_error(error: Exception) -> bool:
    """Whether an accelerator failed: after a fault of its own (an illegal access, a hardware error) every further
    step of the process fails too. Memory that ran out is none: a smaller step may do."""
    text = str(error)
    if isinstance(error, torch.OutOfMemoryError) or "out of memory" in text or "ALLOC_FAILED" in text:
        return False
    return isinstance(error, torch.AcceleratorError) or "CUDA error" in text
