"""Compiling the kernels, once for each source, compiler and set of instructions."""

from __future__ import annotations

import hashlib
import logging
import os
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

logger = logging.getLogger(__name__)

# In order of preference: what the CPU must have, by the names in /proc/cpuinfo, and the compiler be told.
_INSTRUCTION_SETS = {
    "avx512": {"avx512f": "-mavx512f", "avx512bw": "-mavx512bw", "avx512vl": "-mavx512vl", "avx512dq": "-mavx512dq",
               "avx512vbmi": "-mavx512vbmi", "avx512_bf16": "-mavx512bf16",
               "avx2": "-mavx2", "fma": "-mfma"},
    "avx2": {"avx2": "-mavx2", "fma": "-mfma"},
}  # fmt: skip
_FLAGS = ("-O3", "-std=c++17", "-fopenmp", "-fPIC", "-shared", "-fno-math-errno", "-fno-trapping-math")
_COMPILE_SECONDS = 300.0
_SOURCES = Path(__file__).parent
# Compiled beforehand, where an image leaves out the compiler.
_BUILT = _SOURCES / "built"


class CannotBuild(Exception):
    """There are no kernels for this machine; the message says why."""


def build(folder: Path | None = None, cpu_flags: frozenset[str] | None = None) -> Path:
    """The compiled library for the best instruction set that both CPU and compiler have.

    `folder`: where it is put, and looked for; unset: beside the sources if it was put there, else the user's cache.
    `cpu_flags`: what the CPU can do; unset: asked of it. The compiler is `CXX`, or c++. Raises CannotBuild.
    """
    has = read_cpu_flags() if cpu_flags is None else cpu_flags
    usable = usable_instruction_sets(has)
    if not usable:
        raise CannotBuild("the CPU has no AVX2")
    if folder is None:
        for name in usable:
            if (ready := _BUILT / _file_name(name, "")).is_file():
                return ready
    command = shlex.split(os.environ.get("CXX", "c++"))
    compiler = shutil.which(command[0]) if command else None
    if compiler is None:
        raise CannotBuild(f"there is no C++ compiler ({' '.join(command) or 'CXX is empty'})")
    command[0] = compiler
    version = _run([*command, "--version"])
    place = _cache() if folder is None else folder
    problem = ""
    for name in usable:
        target = place / _file_name(name, shlex.join(command) + version)
        if target.is_file():
            return target
        try:
            _compile(command, name, target)
        except CannotBuild as error:
            problem = problem or str(error)
            logger.warning("kernels for %s cannot be compiled: %s", name, error)
        else:
            return target
    raise CannotBuild(problem)


def build_ahead() -> list[Path]:
    """Compiles for every instruction set there is, to where they are found without a compiler; returns the files.

    Raises CannotBuild.
    """
    _BUILT.mkdir(exist_ok=True)
    command = shlex.split(os.environ.get("CXX", "c++"))
    targets = [_BUILT / _file_name(name, "") for name in _INSTRUCTION_SETS]
    for name, target in zip(_INSTRUCTION_SETS, targets, strict=True):
        _compile(command, name, target)
    return targets


def usable_instruction_sets(cpu_flags: frozenset[str]) -> list[str]:
    """Those that a CPU has which can do this, the best first."""
    return [name for name, needed in _INSTRUCTION_SETS.items() if needed.keys() <= cpu_flags]


def read_cpu_flags() -> frozenset[str]:
    """As Linux names them; none on other systems, or other architectures than x86-64."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    return frozenset(next((line for line in text.splitlines() if line.startswith("flags")), "").split())


def _file_name(instruction_set: str, compiler: str) -> str:
    digest = hashlib.sha256(repr((_FLAGS, _INSTRUCTION_SETS[instruction_set], compiler)).encode())
    for source in sorted([*_SOURCES.glob("*.h"), *_SOURCES.glob("*.cpp")]):
        digest.update(source.read_bytes())
    return f"kernels-{instruction_set}-{digest.hexdigest()[:16]}.so"


def _cache() -> Path:
    """The user's own folder for what can be made again. Raises CannotBuild if another could write to it."""
    try:
        place = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "outrider" / "native"
    except RuntimeError as error:  # a user that the system does not know
        raise CannotBuild("there is no home folder, and XDG_CACHE_HOME is unset") from error
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = place.stat()
    except OSError as error:
        raise CannotBuild(f"{place} cannot be made: {error.strerror}") from error
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise CannotBuild(f"others may write to {place}")
    return place


def _compile(command: list[str], instruction_set: str, target: Path) -> None:
    logger.info("compiling kernels for %s: a few seconds, once", instruction_set)
    flags = [*_FLAGS, *_INSTRUCTION_SETS[instruction_set].values()]
    try:
        # Under its name only when it is whole: another process may compile the same.
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            made = Path(folder) / target.name
            _run([*command, *flags, str(_SOURCES / "kernels.cpp"), "-o", str(made)])
            with made.open("rb") as file:
                os.fsync(file.fileno())  # or a machine that loses power may keep the name without the contents
            made.replace(target)
    except OSError as error:
        raise CannotBuild(f"{target.parent} cannot be written to: {error.strerror}") from error


def _run(command: list[str]) -> str:
    """What it prints. Raises CannotBuild with its first line of error."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotBuild(f"{command[0]} does not run: {error}") from error
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines() or ["?"]
        raise CannotBuild(f"{command[0]}: {lines[0].strip()}")
    return done.stdout
