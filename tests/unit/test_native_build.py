"""Compiling the kernels: once, where others cannot write, and with a clear word where it cannot be."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

import pytest
import torch

from shared.engine.native import build as build_module
from shared.engine.native import library as library_module
from shared.engine.native.build import CannotBuild, build, read_cpu_flags
from shared.engine.native.library import Library, load_library
from tests.support.models import DEMO_TARGET

AVX2 = frozenset({"avx2", "fma"})
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512vbmi", "avx512_bf16"}
AMX = AVX512 | {"amx_tile", "amx_bf16"}


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(build_module, "_BUILT", tmp_path / "built")
    return tmp_path / "cache" / "outrider" / "native"


def fake_compiler(folder: Path, script: str) -> str:
    path = folder / "fake-c++"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


# Says its version, and makes of each call a file with its arguments.
RECORDS = 'case "$*" in *--version*) echo fake 1;; *) for last; do :; done; echo "$*" > "$last";; esac'


def test_a_library_is_compiled_once_for_the_best_instructions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, empty_cache: Path
) -> None:
    monkeypatch.setenv("CXX", fake_compiler(tmp_path, RECORDS))
    path = build(cpu_flags=AMX)
    assert path.parent == empty_cache
    assert b"-mamx-bf16" in path.read_bytes()
    first = path.stat()
    assert build(cpu_flags=AMX).stat() == first
    second = build(cpu_flags=AMX - {"amx_bf16"})
    assert b"-mamx" not in second.read_bytes()
    assert b"-mavx512bf16" in second.read_bytes()
    third = build(cpu_flags=AMX - {"avx512_bf16"})
    assert b"-mavx512" not in third.read_bytes()
    assert b"-mavx2" in third.read_bytes()
    assert sorted(empty_cache.iterdir()) == sorted([path, second, third])  # and nothing half done


def test_another_compiler_compiles_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", fake_compiler(tmp_path, RECORDS))
    first = build(cpu_flags=AVX2)
    monkeypatch.setenv("CXX", fake_compiler(tmp_path, RECORDS.replace("fake 1", "fake 2")))
    assert build(cpu_flags=AVX2) != first


def test_a_compiler_too_old_for_the_best_compiles_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = f'case "$*" in *avx512*) echo "error: unrecognized option \'-mavx512bf16\'" >&2; exit 1;; esac\n{RECORDS}'
    monkeypatch.setenv("CXX", fake_compiler(tmp_path, old))
    assert "-avx2-" in build(cpu_flags=AVX512).name


@pytest.mark.parametrize(
    ("compiler", "says"),
    [
        ("no-such-compiler", "there is no C++ compiler"),
        ("", "there is no C++ compiler"),
        ("c++ '", "CXX is no command: No closing quotation"),
        ("echo 'kernels.cpp:1: error: no' >&2; exit 1", "kernels.cpp:1: error: no"),
        (r"printf 'error: \377\n' >&2; exit 1", "error: \ufffd"),
        ("kill -9 $$; exit", "was ended by signal 9"),
        ("exit 0", "made no library"),
    ],
)
def test_without_a_compiler_that_works_it_says_so(
    compiler: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, empty_cache: Path
) -> None:
    if "exit" in compiler:
        compiler = fake_compiler(tmp_path, compiler)
    monkeypatch.setenv("CXX", compiler)
    with pytest.raises(CannotBuild) as raised:
        build(cpu_flags=AVX2)
    assert says in str(raised.value)
    assert not empty_cache.exists() or not list(empty_cache.iterdir())


@pytest.mark.parametrize("flags", [frozenset(), frozenset({"avx2"}), AVX512 - {"fma"}])
def test_a_cpu_without_avx2_has_no_kernels(flags: frozenset[str]) -> None:
    with pytest.raises(CannotBuild, match="no AVX2"):
        build(cpu_flags=flags)


def test_a_cache_that_others_may_write_to_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, empty_cache: Path
) -> None:
    monkeypatch.setenv("CXX", fake_compiler(tmp_path, RECORDS))
    empty_cache.mkdir(parents=True)
    empty_cache.chmod(0o777)
    with pytest.raises(CannotBuild, match="others may write"):
        build(cpu_flags=AVX2)


@pytest.mark.parametrize("left", [0, 1, 40, -1])
def test_a_library_that_lost_some_of_its_contents_is_compiled_anew(
    left: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", fake_compiler(tmp_path, RECORDS))
    path = build(cpu_flags=AVX2)
    whole = path.read_bytes()
    for damaged in (whole[:left], whole[:left] + bytes(len(whole[left:]))):
        path.write_bytes(damaged)
        assert build(cpu_flags=AVX2) == path
        assert path.read_bytes()[:40] == whole[:40]
        assert len(path.read_bytes()) > 40


def test_one_compiled_ahead_that_lost_some_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", fake_compiler(tmp_path, RECORDS))
    ahead = build_module.build_ahead()
    ahead[0].write_bytes(ahead[0].read_bytes()[:10])
    assert build(cpu_flags=AMX) == ahead[1]
    ahead[1].write_bytes(b"")
    assert build(cpu_flags=AVX512) == ahead[2]
    ahead[2].write_bytes(b"")
    assert build(cpu_flags=AMX).parent != ahead[2].parent


def test_a_cache_that_cannot_be_looked_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, empty_cache: Path) -> None:
    """As a folder without permission to enter it answers, but to the system's administrator."""

    def read_bytes(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setenv("CXX", fake_compiler(tmp_path, RECORDS))
    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    monkeypatch.setattr(build_module, "_file_name", lambda *_: "kernels.so")
    assert build(cpu_flags=AVX2).is_file()


def test_a_compiler_that_hangs_is_ended_with_what_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    children = tmp_path / "children"
    hangs = f'case "$*" in *--version*) echo fake 1;; *) sleep 1000 & echo $! >> {children}; wait;; esac'
    monkeypatch.setenv("CXX", fake_compiler(tmp_path, hangs))
    monkeypatch.setattr(build_module, "_COMPILE_SECONDS", 1.0)
    with pytest.raises(CannotBuild, match="was not done after 1 s"):
        build(cpu_flags=AVX512)
    (child,) = children.read_text().split()  # once, not for every set of instructions
    status = Path("/proc", child, "status")
    assert not status.exists() or "State:\tZ" in status.read_text()


def test_what_killed_processes_left_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, empty_cache: Path
) -> None:
    monkeypatch.setenv("CXX", fake_compiler(tmp_path, RECORDS))
    left, others = empty_cache / "compiling-left", empty_cache / "compiling-others"
    for folder in (left, others):
        folder.mkdir(parents=True)
        (folder / "kernels.so").touch()
    empty_cache.chmod(0o700)
    long_ago = time.time() - 3600
    os.utime(left, (long_ago, long_ago))
    build(cpu_flags=AVX2)
    assert not left.exists()
    assert others.exists(), "that may be at work"


def test_a_folder_that_another_process_leaves_meanwhile_is_no_obstacle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, empty_cache: Path
) -> None:
    monkeypatch.setenv("CXX", fake_compiler(tmp_path, RECORDS))
    glob = Path.glob

    def with_one_that_is_gone(place: Path, pattern: str) -> list[Path]:
        return (
            [*glob(place, pattern), place / "compiling-gone"] if "compiling" in pattern else list(glob(place, pattern))
        )

    monkeypatch.setattr(Path, "glob", with_one_that_is_gone)
    assert build(cpu_flags=AVX2).is_file()


def test_one_line_says_what_cannot_be_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", fake_compiler(tmp_path, "echo 'error: no' >&2; exit 1"))
    with caplog.at_level(logging.WARNING), pytest.raises(CannotBuild, match="error: no"):
        build(cpu_flags=AVX512)
    assert not caplog.records


def test_a_user_without_a_home_has_no_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setenv("CXX", fake_compiler(tmp_path, RECORDS))
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", home)
    with pytest.raises(CannotBuild, match="no home folder"):
        build(cpu_flags=AVX2)


def test_a_cache_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", fake_compiler(tmp_path, RECORDS))
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(CannotBuild, match="cannot be made: Not a directory"):
        build(cpu_flags=AVX2)


def test_what_was_compiled_ahead_needs_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", fake_compiler(tmp_path, RECORDS))
    ahead = build_module.build_ahead()
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert [build(cpu_flags=flags) for flags in (AMX, AVX512, AVX2)] == ahead


def test_a_file_that_is_no_such_library_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "kernels.so"
    path.write_text("not a library")
    with pytest.raises(CannotBuild, match="cannot be loaded"):
        Library(path)


def test_without_kernels_torch_serves_and_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from shared.engine.model import CausalLM

    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(library_module, "build", lambda: build(cpu_flags=AVX2))
    load_library.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            model = CausalLM.load(str(DEMO_TARGET), "cpu", "bfloat16")
    finally:
        load_library.cache_clear()
    assert model.kernels is None
    assert "no C++ compiler" in caplog.text


def test_this_machines_flags_are_read() -> None:
    flags = read_cpu_flags()
    assert ("avx2" in flags) == (torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512"))


def test_tiles_are_for_those_whom_the_system_lets_use_them(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    others, tiles = {"avx2", "fma", "avx512_bf16"}, {"amx_bf16", "amx_tile", "amx_int8"}
    monkeypatch.setattr(Path, "read_text", lambda _: f"processor\t: 0\nflags\t\t: {' '.join(others | tiles)}\n")
    monkeypatch.setattr(build_module, "_ASK_FOR_TILES", (-1, 0, 0))  # no call of any system
    assert read_cpu_flags() & (others | tiles) == others
    assert "does not let this process use AMX" in caplog.text
    monkeypatch.setattr(build_module, "_may_use_tiles", lambda: True)
    assert read_cpu_flags() >= others | tiles
