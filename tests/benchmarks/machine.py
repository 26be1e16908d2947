"""The machine that a benchmark ran on."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from shared.engine.native.build import read_cpu_flags, usable_instruction_sets

_CPU_INFO = Path("/proc/cpuinfo")


@dataclass(frozen=True, slots=True)
class Machine:
    """What else than our code the numbers depend on; `cores` are those this process may use, `instructions` the best
    set of them that there are kernels for.

    `load_average` is the number of running processes over the minute before: more than a little, and the
    numbers are those of a busy machine.
    """

    cpu: str
    instructions: str
    cores: int
    python: str
    torch: str
    transformers: str
    load_average: float

    def __str__(self) -> str:
        versions = f"Python {self.python}, torch {self.torch}, transformers {self.transformers}"
        cpu = f"{self.cpu} ({self.instructions}), {self.cores} cores"
        return f"{cpu}, load {self.load_average:.1f} at the start; {versions}"


def this_machine() -> Machine:
    affinity = getattr(os, "sched_getaffinity", None)  # Linux alone has it
    return Machine(
        cpu=_cpu_model(),
        instructions=next(iter(usable_instruction_sets(read_cpu_flags())), "no AVX2"),
        cores=len(affinity(0)) if affinity is not None else os.cpu_count() or 1,
        python=platform.python_version(),
        torch=metadata.version("torch"),
        transformers=metadata.version("transformers"),
        load_average=os.getloadavg()[0],
    )


def _cpu_model() -> str:
    if _CPU_INFO.exists():
        for line in _CPU_INFO.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()
