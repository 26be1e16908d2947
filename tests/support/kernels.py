"""The compiled kernels, for each set of instructions that this machine can run."""

from __future__ import annotations

import functools

import pytest

from shared.engine.native.build import CannotBuild, build, read_cpu_flags
from shared.engine.native.library import Library

# What a CPU without AVX-512 has.
_AVX2 = frozenset({"avx2", "fma"})
INSTRUCTION_SETS = ("avx512", "avx2")


@functools.cache
def kernels(instruction_set: str) -> Library:
    """Skips the test where the CPU lacks the instructions, or there is no compiler."""
    flags = read_cpu_flags() if instruction_set == "avx512" else read_cpu_flags() & _AVX2
    try:
        path = build(cpu_flags=flags)
    except CannotBuild as error:
        pytest.skip(str(error))
    if f"-{instruction_set}-" not in path.name:
        pytest.skip(f"this CPU has no {instruction_set} with bf16")
    return Library(path)
