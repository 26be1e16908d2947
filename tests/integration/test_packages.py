"""The distributions that are built from the repository: the server's, and the stubs' for its clients."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

SOURCES = ("LICENSE", "README.md", "pyproject.toml", "protos", "services", "shared")
REPOSITORY = Path(__file__).resolve().parents[2]
VERSION = (REPOSITORY / "protos" / "VERSION").read_text().strip()


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By distribution, built from a copy of the sources without the generated stubs."""
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheels")
    for name in SOURCES:
        if (REPOSITORY / name).is_dir():
            ignored = shutil.ignore_patterns("*_pb2*", "__pycache__", "models")
            shutil.copytree(REPOSITORY / name, source / name, ignore=ignored, symlinks=True)
        else:
            shutil.copy(REPOSITORY / name, source / name)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(built)]
    subprocess.run([*command, str(source), str(source / "protos")], check=True)
    return {wheel.name.split("-")[0]: wheel for wheel in built.glob("*.whl")}


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [each for each in archive.namelist() if each.endswith(".dist-info/METADATA")]
        return Parser().parsestr(archive.read(name).decode())


def files(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def test_there_are_two_of_one_version_and_licence(wheels: dict[str, Path]) -> None:
    assert set(wheels) == {"outrider", "outrider_client"}
    for wheel in wheels.values():
        assert metadata(wheel)["Version"] == VERSION
        assert metadata(wheel)["License-Expression"] == "Apache-2.0"
        with zipfile.ZipFile(wheel) as archive:
            (licence,) = [name for name in archive.namelist() if name.endswith("/licenses/LICENSE")]
            assert archive.read(licence) == (REPOSITORY / "LICENSE").read_bytes()


def test_clients_get_the_stubs_their_types_and_nothing_else(wheels: dict[str, Path]) -> None:
    protos = {path.stem for path in (REPOSITORY / "protos" / "outrider" / "v1").glob("*.proto")}
    assert protos
    generated = {f"{proto}_pb2{kind}" for proto in protos for kind in (".py", ".pyi", "_grpc.py", "_grpc.pyi")}
    expected = generated | {f"{proto}.proto" for proto in protos} | {"py.typed"}
    assert files(wheels["outrider_client"]) == {f"outrider/v1/{name}" for name in expected}
    required = metadata(wheels["outrider_client"]).get_all("Requires-Dist") or []
    assert {re.split("[<>=]", each)[0] for each in required} == {"grpcio", "protobuf"}


def test_the_server_needs_the_stubs_of_its_own_version(wheels: dict[str, Path]) -> None:
    assert f"outrider-client=={VERSION}" in (metadata(wheels["outrider"]).get_all("Requires-Dist") or [])
    assert not {name for name in files(wheels["outrider"]) if name.startswith("outrider/") or "_pb2" in name}


def test_the_server_brings_the_sources_of_its_kernels(wheels: dict[str, Path]) -> None:
    folder = REPOSITORY / "shared" / "engine" / "native"
    sources = {f"shared/engine/native/{path.name}" for path in folder.iterdir() if path.suffix in (".cpp", ".h")}
    assert len(sources) > 1
    assert sources <= files(wheels["outrider"])


def test_a_client_needs_no_more_than_its_distribution(wheels: dict[str, Path], tmp_path: Path) -> None:
    zipfile.ZipFile(wheels["outrider_client"]).extractall(tmp_path)
    program = (
        "import sys; from outrider.v1 import inference_pb2, inference_pb2_grpc as stubs; "
        "print(stubs.__file__, sorted({'torch', 'services', 'shared'} & set(sys.modules)))"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, check=True, capture_output=True, text=True
    )
    assert result.stdout.strip() == f"{tmp_path / 'outrider' / 'v1' / 'inference_pb2_grpc.py'} []"
