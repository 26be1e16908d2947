"""The Triton kernels compile for GPUs of three generations, and have the registers that they need."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

# Shared memory that a program may have on each device from Ampere on.
LEAST_SHARED_BYTES = 99 << 10


def compiled(*arguments: str) -> list[dict[str, Any]]:
    """In a process of its own: where kernels are interpreted they cannot be compiled."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.compiled", *arguments],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.long)], ids=["one of each", "all"])
@pytest.mark.timeout(900)
def test_kernels_compile_and_spill_nothing(every: bool) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    kernels = compiled(*(["--all"] if every else []))
    assert {kernel["target"] for kernel in kernels} == {80, 90, 100}
    assert len(kernels) >= 3 * 7
    assert [kernel for kernel in kernels if kernel["spilled"]] == []
    assert [kernel for kernel in kernels if kernel["shared"] > LEAST_SHARED_BYTES] == []
