"""The environment a worker process needs before it imports torch, and its tie to the process that started it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

HUGE_PAGES = "glibc.malloc.hugetlb=1:glibc.malloc.arena_max=1"
"""Has glibc ask for huge pages, also for what other threads than the main one allocate: weights are streamed
from memory once a step, and 4 KiB pages cost up to a seventh of that in address translation."""

PREPARED = "OUTRIDER_WORKER_ENVIRONMENT"
"""Set in a prepared environment; its value says what was found, for the log."""

PARENT = "OUTRIDER_PARENT_PID"
"""Set by a parent whose end is to be the end of its child."""

TCMALLOC_PATTERNS = (
    "/usr/lib/*/libtcmalloc_minimal.so.*",
    "/usr/lib/*/libtcmalloc.so.*",
    "/usr/lib64/libtcmalloc_minimal.so.*",
    "/usr/lib64/libtcmalloc.so.*",
    "/usr/local/lib/libtcmalloc_minimal.so.*",
    "/usr/local/lib/libtcmalloc.so.*",
)

_PR_SET_PDEATHSIG = 1


def worker_environment(base: Mapping[str, str]) -> dict[str, str]:
    """`base` with what lets draft and target share a machine's cores.

    OpenMP workers that spin while idle steal the other process's cores. Intel's runtime, preloaded and
    told to sleep after 0.2 ms (KMP_BLOCKTIME), alternates best; tcmalloc gains a little more. A library
    that is not installed is left out, and what the user has set stays as it is.
    """
    environment = dict(base)
    environment.setdefault("GLIBC_TUNABLES", HUGE_PAGES)
    if "LD_PRELOAD" in base:
        environment[PREPARED] = "LD_PRELOAD as set by the user"
        return environment
    openmp, tcmalloc = _find_intel_openmp(), _find_tcmalloc()
    if openmp is not None:
        environment.setdefault("KMP_BLOCKTIME", "200us")
    preload = [str(library) for library in (openmp, tcmalloc) if library is not None]
    if preload:
        environment["LD_PRELOAD"] = " ".join(preload)
    runtime = "Intel OpenMP" if openmp else "default OpenMP (intel-openmp is not installed)"
    environment[PREPARED] = f"{runtime}, {'tcmalloc' if tcmalloc else 'default malloc'}"
    return environment


def prepare_this_process() -> None:
    """Starts this very command again in its worker environment, unless it is in it already."""
    if PREPARED not in os.environ:
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], worker_environment(os.environ))


def die_with_parent() -> None:
    """Ends this process by SIGTERM when the parent that asked for it (`PARENT`) ends, however it ends.

    Linux only (prctl PR_SET_PDEATHSIG); elsewhere, and without `PARENT`, nothing happens.
    """
    parent = os.environ.get(PARENT)
    if parent is None or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(parent):  # it ended before prctl took hold
        raise SystemExit(128 + signal.SIGTERM)


def _find_intel_openmp() -> Path | None:
    """The libiomp5 of the intel-openmp package, if it is installed."""
    try:
        files = metadata.files("intel-openmp") or []
    except metadata.PackageNotFoundError:
        return None
    found = [Path(str(file.locate())).resolve() for file in files if file.name == "libiomp5.so"]
    return next((path for path in found if path.exists()), None)


def _find_tcmalloc() -> Path | None:
    """A tcmalloc of the system's, if it has one."""
    for pattern in TCMALLOC_PATTERNS:
        found = sorted(Path("/").glob(pattern.lstrip("/")))
        if found:
            return found[0]
    return None
