"""Compiling the kernels, once for each source, compiler and set of instructions."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path

logger = logging.getLogger(__name__)

# In order of preference: what the CPU must have, by the names in /proc/cpuinfo, and the compiler be told.
_AVX2 = {"avx2": "-mavx2", "fma": "-mfma"}
_AVX512 = {"avx512f": "-mavx512f", "avx512bw": "-mavx512bw", "avx512vl": "-mavx512vl", "avx512dq": "-mavx512dq",
           "avx512vbmi": "-mavx512vbmi", "avx512_bf16": "-mavx512bf16", **_AVX2}  # fmt: skip
_INSTRUCTION_SETS = {
    "amx": {"amx_tile": "-mamx-tile", "amx_bf16": "-mamx-bf16", **_AVX512},
    "avx512": _AVX512,
    "avx2": _AVX2,
}
# The flags of what Linux lets only those processes use that ask for it, and how: arch_prctl(ARCH_REQ_XCOMP_PERM,
# XFEATURE_XTILEDATA) of x86-64.
_TILES = frozenset({"amx_tile", "amx_bf16", "amx_int8"})
_ASK_FOR_TILES = (158, 0x1023, 18)
_FLAGS = ("-O3", "-std=c++17", "-fopenmp", "-fPIC", "-shared", "-fno-math-errno", "-fno-trapping-math")
_COMPILE_SECONDS = 300.0
_SOURCES = Path(__file__).parent
# Compiled beforehand, where an image leaves out the compiler.
_BUILT = _SOURCES / "built"
# Folders in the cache in which something is being compiled, or was until its process was killed.
_WORKING = "compiling-"
_DIGEST_SIZE = hashlib.sha256().digest_size


class CannotBuild(Exception):
    """There are no kernels for this machine; the message says why."""


class TookTooLong(CannotBuild):
    """The compiler hangs, and would again."""


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
            if _is_whole(ready := _BUILT / _file_name(name, "")):
                return ready
    command = _compiler()
    version = _run([*command, "--version"])
    place = _cache() if folder is None else folder
    problems: dict[str, CannotBuild] = {}
    for name in usable:
        target = place / _file_name(name, shlex.join(command) + version)
        try:
            if not _is_whole(target):
                _compile(command, name, target)
        except TookTooLong:
            raise
        except CannotBuild as error:
            problems[name] = error
            continue
        for other, problem in problems.items():
            logger.warning("kernels for %s serve, as those for %s cannot be compiled: %s", name, other, problem)
        return target
    raise next(iter(problems.values()))


def build_ahead() -> list[Path]:
    """Compiles for every instruction set there is, to where they are found without a compiler; returns the files.

    Raises CannotBuild if there is one that cannot be compiled: an image that lacks it would be slow on whole machines.
    """
    _BUILT.mkdir(exist_ok=True)
    command = _compiler()
    targets = [_BUILT / _file_name(name, "") for name in _INSTRUCTION_SETS]
    for name, target in zip(_INSTRUCTION_SETS, targets, strict=True):
        _compile(command, name, target)
    return targets


def usable_instruction_sets(cpu_flags: frozenset[str]) -> list[str]:
    """Those that a CPU has which can do this, the best first."""
    return [name for name, needed in _INSTRUCTION_SETS.items() if needed.keys() <= cpu_flags]


def read_cpu_flags() -> frozenset[str]:
    """As Linux names them, of what this process may use; none on other systems, or other architectures than x86-64."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    flags = frozenset(next((line for line in text.splitlines() if line.startswith("flags")), "").split())
    if flags.isdisjoint(_TILES) or _may_use_tiles():
        return flags
    logger.warning("the system does not let this process use AMX: kernels without it serve")
    return flags - _TILES


def _may_use_tiles() -> bool:
    """Asks for it, for the process with all its threads; it may be asked again."""
    answer: int = ctypes.CDLL(None).syscall(*_ASK_FOR_TILES)
    return answer == 0


def _compiler() -> list[str]:
    """The words of its command, the first a path. Raises CannotBuild."""
    try:
        command = shlex.split(os.environ.get("CXX", "c++"))
    except ValueError as error:
        raise CannotBuild(f"CXX is no command: {error}") from error
    path = shutil.which(command[0]) if command else None
    if path is None:
        raise CannotBuild(f"there is no C++ compiler ({' '.join(command) or 'CXX is empty'})")
    return [path, *command[1:]]


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
    if status.st_uid != os.getuid():
        raise CannotBuild(f"{place} belongs to another user")
    if status.st_mode & 0o022:
        raise CannotBuild(f"others may write to {place}")
    return place


def _is_whole(library: Path) -> bool:
    """Whether it is there, and as it was written: at its end it has a digest of what is before. To load a file that a
    full or failing disk cut short ends the process."""
    try:
        contents = library.read_bytes()
    except OSError:
        return False
    size = len(contents) - _DIGEST_SIZE
    return size > 0 and _digest(contents[:size]) == contents[size:]


def _digest(contents: bytes) -> bytes:
    return hashlib.sha256(contents).digest()


def _compile(command: list[str], instruction_set: str, target: Path) -> None:
    logger.info("compiling kernels for %s: a few seconds, once", instruction_set)
    flags = [*_FLAGS, *_INSTRUCTION_SETS[instruction_set].values()]
    try:
        _remove_abandoned(target.parent)
        # Under its name only when it is whole: another process may compile the same.
        with tempfile.TemporaryDirectory(prefix=_WORKING, dir=target.parent) as folder:
            made = Path(folder) / target.name
            _run([*command, *flags, str(_SOURCES / "kernels.cpp"), "-o", str(made)])
            if not made.is_file():
                raise CannotBuild(f"{command[0]} made no library")
            with made.open("r+b") as file:
                digest = _digest(file.read())
                file.write(digest)
                file.flush()
                os.fsync(file.fileno())  # or a machine that loses power may keep the name without the contents
            made.replace(target)
    except OSError as error:
        raise CannotBuild(f"{target.parent} cannot be written to: {error.strerror}") from error


def _remove_abandoned(place: Path) -> None:
    """Folders of processes that were killed: those that any would have left by now."""
    for folder in place.glob(f"{_WORKING}*"):
        with suppress(FileNotFoundError):  # of another process, which just left it
            if time.time() - folder.stat().st_mtime > 2 * _COMPILE_SECONDS:
                shutil.rmtree(folder, ignore_errors=True)


def _run(command: list[str]) -> str:
    """What it prints. Raises CannotBuild with its first line of error."""
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        raise CannotBuild(f"{command[0]} does not run: {error.strerror}") from error
    try:
        output, errors = process.communicate(timeout=_COMPILE_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise TookTooLong(f"{command[0]} was not done after {_COMPILE_SECONDS:.0f} s") from error
    finally:
        if process.returncode is None:  # with what it started
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    if process.returncode < 0:
        raise CannotBuild(f"{command[0]} was ended by signal {-process.returncode}")
    if process.returncode > 0:
        lines = [line for line in errors.splitlines() if "error" in line] or errors.splitlines() or ["?"]
        raise CannotBuild(f"{command[0]}: {lines[0].strip()}")
    return output
