"""Generates `outrider.v1` stubs (`*_pb2.py`, `*_pb2_grpc.py` and their `.pyi`) beside the protos.

Run by `make protos`, and by hatchling whenever the project is built or installed.
"""

from __future__ import annotations

import sys
from importlib import resources
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PROTOS = Path(__file__).resolve().parent


def generate() -> None:
    """Compiles every proto below this folder. Raises RuntimeError if protoc finds fault with one."""
    # Imported here, not above: an editable install loads this file before it knows what building requires.
    from grpc_tools import protoc

    sources = sorted(str(path) for path in PROTOS.glob("outrider/v1/*.proto"))
    # protoc looks for the mypy plugin on the path, and a build environment's scripts may not be there.
    plugin = Path(sys.executable).with_name("protoc-gen-mypy_grpc")
    arguments = ["protoc", f"-I{PROTOS}", f"-I{resources.files('grpc_tools') / '_proto'}"]
    arguments += [f"--python_out={PROTOS}", f"--pyi_out={PROTOS}", f"--grpc_python_out={PROTOS}"]
    arguments += [f"--mypy_grpc_out=quiet:{PROTOS}"]
    if plugin.exists():
        arguments += [f"--plugin={plugin}"]
    if protoc.main([*arguments, *sources]) != 0:
        raise RuntimeError("protoc failed: see above")


class StubsHook(BuildHookInterface[Any]):
    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        generate()


if __name__ == "__main__":
    generate()
    print("stubs written to", PROTOS / "outrider" / "v1")
