"""What every test has: its share of the cores, and stacks whose processes start warm."""

from __future__ import annotations

import os

# Kernels for GPUs are interpreted, but where a device is to compute with them (make test-gpu): to be said before
# anything imports Triton.
os.environ.setdefault("TRITON_INTERPRET", "1")

import gc
from collections.abc import Iterator

import pytest
import torch

from services.cli import process
from shared.engine import runner
from tests.support.warm_start import WarmStart


def _num_threads() -> int:
    """Threads of two processes on the same cores wait for one another, spinning: each step then takes six times as
    long."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    return max(1, len(os.sched_getaffinity(0)) // workers)


def pytest_configure() -> None:
    torch.set_num_threads(_num_threads())


def pytest_collection_finish() -> None:
    """What is imported by now is never collected: else every engine that is made here would look through all of it. Nor
    are its steps measured more often than once, for nobody is placed by that."""
    gc.collect()
    gc.freeze()
    runner._MEASURED_TURNS = 1


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """A test begins with as many as the first: what loads an engine sets them for the process, and a small model is
    worth one."""
    yield
    torch.set_num_threads(_num_threads())


@pytest.fixture(autouse=True, scope="session")
def warm_start() -> Iterator[None]:
    warm = WarmStart()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "create_subprocess_exec", warm.spawn)
        yield
    warm.stop()
