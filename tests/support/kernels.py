"""The compiled kernels, for each set of instructions that this machine can run."""

from __future__ import annotations

import functools

import pytest

from shared.engine.native.build import CannotBuild, build, read_cpu_flags
from shared.engine.native.library import Library

# What a CPU has that has no better.
_AVX2 = frozenset({"avx2", "fma"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512vbmi", "avx512_bf16"}
_FLAGS = {"amx": _AVX512 | {"amx_tile", "amx_bf16"}, "avx512": _AVX512, "avx2": _AVX2}
INSTRUCTION_SETS = tuple(_FLAGS)


@functools.cache
def kernels(instruction_set: str) -> Library:
    """Skips the test where the CPU lacks the instructions, or there is no compiler."""
    try:
        path = build(cpu_flags=read_cpu_flags() & _FLAGS[instruction_set])
    except CannotBuild as error:
        pytest.skip(str(error))
    if f"-{instruction_set}-" not in path.name:
        pytest.skip(f"this CPU has no {instruction_set} with bf16")
    return Library(path)
