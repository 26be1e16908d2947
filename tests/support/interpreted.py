"""Triton's kernels in its interpreter, on a CPU; conftest.py says that they are."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from shared.engine.cuda.kernels import TritonKernels, load_triton


def interpreted() -> TritonKernels:
    kernels = load_triton()
    assert kernels is not None
    return kernels
