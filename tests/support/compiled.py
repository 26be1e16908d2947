"""Compiles the Triton kernels for GPUs that need not be there, and says what of their registers spills to memory.

python -m tests.support.compiled [--all] [TARGET ...]  # prints a line of JSON for each kernel and target
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from shared.engine.cuda.attention import attend_pieces, merge_parts, write_kv
from shared.engine.cuda.elementwise import add_and_normalise, gate, rotate_and_write
from shared.engine.cuda.step import tile_of
from shared.engine.cuda.work import ITEM_FIELDS

TARGETS = (80, 90, 100)
_WARP = 32
_OPTIONS = ("HAS_WINDOW", "HAS_SOFTCAP", "HAS_SINKS", "HAS_TREES")
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
# What the kernels take beside tensors: floats, and else whole numbers.
_FLOATS = {"scale", "softcap", "epsilon"}
_LONG = {"layer_offset", "block_stride", "value_offset", "position_stride", "head_stride"}
_TENSORS = {
    "items": "*i64", "num_items": "*i64", "tables": "*i64", "positions": "*i64", "ancestors": "*i64",
    "first_parts": "*i64", "slots": "*i64", "parts": "*fp32", "part_logs": "*fp32", "sinks": "*fp32",
}  # fmt: skip


class Compiled(NamedTuple):
    """`spilled`: bytes that a thread stores and loads, as it has too few registers; `shared`: bytes of shared memory
    that a program takes."""

    name: str
    target: int
    spilled: int
    shared: int


class _Variant(NamedTuple):
    kernel: Any
    constants: dict[str, Any]
    dtype: str
    num_warps: int = 4
    num_stages: int = 3

    @property
    def name(self) -> str:
        options = ", ".join(f"{name}={value}" for name, value in self.constants.items())
        return f"{self.kernel.__name__}({self.dtype}, {options})"


def attention(target: int, head: int, rows: int, fold: int, *has: str, dtype: str = "bf16") -> _Variant:
    """With these of the options."""
    flags = {name: name in has for name in _OPTIONS}
    tile = tile_of(rows, head * (4 if dtype == "fp32" else 2), "HAS_TREES" in has, target // 10)
    constants: dict[str, Any] = {
        "NUM_KV_HEADS": 8, "FOLD": fold, "KEY_DIM": head, "VALUE_DIM": head, "KEY_SIZE": head, "VALUE_SIZE": head,
        "BLOCK_SIZE": 16, "ROWS": rows, "KEYS": tile.num_keys, "ITEM_FIELDS": ITEM_FIELDS, **flags,
        "UPCAST": False,
    }  # fmt: skip
    return _Variant(attend_pieces, constants, dtype, tile.num_warps, tile.num_stages)


def variants(everything: bool, target: int) -> Iterator[_Variant]:
    """One of each kernel, or all that differ in what they need of a processor."""
    yield attention(target, 128, 64, 4, "HAS_TREES")
    yield attention(target, 128, 16, 4)
    yield _Variant(merge_parts, {"NUM_HEADS": 32, "VALUE_DIM": 128, "VALUE_SIZE": 128, "PARTS": 32}, "bf16")
    yield _Variant(write_kv, {"KEY_DIM": 128, "VALUE_DIM": 128, "KEY_SIZE": 128, "VALUE_SIZE": 128}, "bf16")
    yield _Variant(add_and_normalise, {"HIDDEN": 4096, "SIZE": 4096, "HAS_ADDED": True}, "bf16")
    yield _Variant(gate, {"MLP": 14336, "SIZE": 1024}, "bf16")
    heads = {"NUM_HEADS": 32, "NUM_KV_HEADS": 8, "HEAD_DIM": 128, "HALF": 64, "HALF_SIZE": 64}
    yield _Variant(rotate_and_write, heads | {"HAS_NORMS": True}, "bf16")
    if not everything:
        return
    for head, rows in [(64, 16), (64, 32), (64, 64), (128, 16), (128, 32), (128, 64), (256, 16), (256, 32)]:
        for has in ((), _OPTIONS):
            yield attention(target, head, rows, 4, *has)
    yield attention(target, 128, 64, 4, dtype="fp16")
    yield attention(target, 128, 16, 1, dtype="fp32")
    yield _Variant(rotate_and_write, heads | {"HAS_NORMS": False}, "fp16")


def compile_kernel(variant: _Variant, target: int) -> Compiled:
    """Raises whatever the compiler does."""
    signature: dict[str, str] = {}
    for name in variant.kernel.arg_names:
        if name in variant.constants:
            signature[name] = "constexpr"
        elif name in _FLOATS:
            signature[name] = "fp32"
        elif name in _TENSORS:
            signature[name] = _TENSORS[name]
        elif name in _LONG or name.endswith("stride"):
            signature[name] = "i64"
        elif name == "window":
            signature[name] = "i32"
        else:
            signature[name] = f"*{variant.dtype}"
    # As whole numbers of 16 are told apart when a kernel is launched.
    divisible = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(variant.kernel.arg_names)
        if signature[name].startswith("*") or name in _LONG
    }
    source = ASTSource(fn=variant.kernel, signature=signature, constexprs=variant.constants, attrs=divisible)
    options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages}
    compiled = triton.compile(source, GPUTarget("cuda", target, _WARP), options)
    return Compiled(variant.name, target, _spilled(compiled.asm["ptx"], target), compiled.metadata.shared)


def _spilled(ptx: str, target: int) -> int:
    """As the assembler reports it; what is loaded knows, but that takes a GPU."""
    assembler = get_ptxas(target).path
    name = re.search(r"^\.target (sm_\w+)", ptx, re.MULTILINE)
    assert name is not None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx)
        command = [assembler, "-v", "--regAllocOptLevel=2", f"--gpu-name={name[1]}", str(path)]
        told = subprocess.run([*command, "-o", f"{folder}/kernel.cubin"], check=True, capture_output=True, text=True)
    found = _SPILLS.findall(told.stderr)
    assert found, told.stderr
    return sum(int(stores) + int(loads) for stores, loads in found)


def main() -> None:
    arguments = [argument for argument in sys.argv[1:] if argument != "--all"]
    for target in map(int, arguments or TARGETS):
        for variant in variants("--all" in sys.argv, target):
            print(json.dumps(compile_kernel(variant, target)._asdict()), flush=True)


if __name__ == "__main__":
    main()
