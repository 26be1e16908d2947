"""The workers' environment, and the end of a child whose parent has ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from services.cli import launcher
from services.cli.launcher import HUGE_PAGES, PARENT, PREPARED, worker_environment


@pytest.fixture
def libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A libiomp5 and a tcmalloc that are found."""
    openmp, tcmalloc = tmp_path / "libiomp5.so", tmp_path / "libtcmalloc.so.4"
    openmp.touch()
    tcmalloc.touch()
    monkeypatch.setattr(launcher, "_find_intel_openmp", lambda: openmp)
    monkeypatch.setattr(launcher, "TCMALLOC_PATTERNS", (str(tmp_path / "libtcmalloc.so.*"),))
    return openmp, tcmalloc


def test_both_libraries_are_preloaded(libraries: tuple[Path, Path]) -> None:
    environment = worker_environment({"HOME": "/home"})
    assert environment == {
        "HOME": "/home",
        "LD_PRELOAD": f"{libraries[0]} {libraries[1]}",
        "KMP_BLOCKTIME": "200us",
        "GLIBC_TUNABLES": HUGE_PAGES,
        PREPARED: "Intel OpenMP, tcmalloc",
    }


@pytest.mark.usefixtures("libraries")
def test_what_the_user_set_stays() -> None:
    environment = worker_environment({"KMP_BLOCKTIME": "200"})
    assert environment["KMP_BLOCKTIME"] == "200"
    environment = worker_environment({"LD_PRELOAD": "/mine.so", "GLIBC_TUNABLES": "mine"})
    assert environment == {
        "LD_PRELOAD": "/mine.so",
        "GLIBC_TUNABLES": "mine",
        PREPARED: "LD_PRELOAD as set by the user",
    }


def test_without_the_libraries_only_the_allocator_is_tuned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "_find_intel_openmp", lambda: None)
    monkeypatch.setattr(launcher, "TCMALLOC_PATTERNS", ())
    report = "default OpenMP (intel-openmp is not installed), default malloc"
    assert worker_environment({"A": "b"}) == {"A": "b", "GLIBC_TUNABLES": HUGE_PAGES, PREPARED: report}


def test_an_installed_intel_openmp_is_found() -> None:
    found = launcher._find_intel_openmp()
    if found is None:
        pytest.skip("intel-openmp is not installed")
    assert found.name == "libiomp5.so"
    assert found.is_file()


def test_a_command_is_started_again_once_with_its_arguments(libraries: tuple[Path, Path]) -> None:
    code = (
        "import os, sys; from services.cli.launcher import prepare_this_process; prepare_this_process();"
        "print(os.environ['OUTRIDER_WORKER_ENVIRONMENT'], sys.argv[1:], os.environ.get('KMP_BLOCKTIME'))"
    )
    clean = {name: value for name, value in os.environ.items() if name not in (PREPARED, "LD_PRELOAD")}
    ran = subprocess.run([sys.executable, "-c", code, "a b"], env=clean, check=True, capture_output=True, text=True)
    expected = "200us" if "Intel OpenMP" in ran.stdout else "None"
    assert ran.stdout.strip().endswith(f"['a b'] {expected}")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="prctl is Linux's")
def test_a_child_ends_when_its_parent_is_killed() -> None:
    child = (
        "import signal; from services.cli.launcher import die_with_parent; die_with_parent();"
        "print('up', flush=True); signal.pause()"
    )
    parent = (
        "import os, subprocess, sys;"
        f"subprocess.run([sys.executable, '-c', {child!r}], env={{**os.environ, {PARENT!r}: str(os.getpid())}})"
    )
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.kill()
        assert process.stdout.read() == ""  # returns only when the child, too, has closed its end


def test_a_child_whose_parent_has_ended_already_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "from services.cli.launcher import die_with_parent; die_with_parent(); print('went on')"
    environment = {**os.environ, PARENT: "1"}  # init is not the parent of this test's child
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (128 + signal.SIGTERM, "")


@pytest.mark.parametrize(
    ("name", "default"),
    [("GRPC_VERBOSITY", "ERROR"), ("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")],
)
def test_grpc_is_set_up_before_it_is_imported_unless_told_otherwise(name: str, default: str) -> None:
    program = f"import services.cli.main, os; print(os.environ[{name!r}])"
    environment = {each: value for each, value in os.environ.items() if each != name}
    for added, expected in (({}, default), ({name: "debug"}, "debug")):
        output = subprocess.check_output([sys.executable, "-c", program], env={**environment, **added}, text=True)
        assert output.strip() == expected
