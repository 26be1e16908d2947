"""Noise that the kernels keep: by where it lies, compiled for itself."""

from __future__ import annotations

import ctypes
import os
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from shared.engine.native import build as build_module

WORD = (1 << 64) - 1
Where = Callable[..., list[int]]
"""For so many tokens, of these keys in one request: where the noise of each is."""

SOURCE = """
#include "noise_cache.h"
extern "C" NoiseCache *make() { return new NoiseCache; }
extern "C" void where(NoiseCache *cache, const uint64_t *keys, int64_t rows, int64_t num, const float **out) {
    std::vector<float> ones(rows, 1.0f);
    auto found = cache->rows(keys, ones.data(), rows, num, 1);
    std::copy(found.begin(), found.end(), out);
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("noise")
    source, built = folder / "cache.cpp", folder / "cache.so"
    source.write_text(SOURCE)
    headers = Path(build_module.__file__).parent
    command = [*shlex.split(os.environ.get("CXX", "c++")), "-std=c++17", "-O1", "-shared", "-fPIC", f"-I{headers}"]
    try:
        subprocess.run([*command, str(source), "-o", str(built)], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("there is no compiler")
    library = ctypes.CDLL(str(built))
    library.make.restype = ctypes.c_void_p
    library.where.argtypes = [*[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 2, ctypes.c_void_p]
    return library


@pytest.fixture
def where(library: ctypes.CDLL) -> Where:
    cache = library.make()

    def where(num: int, *keys: int) -> list[int]:
        out = (ctypes.c_void_p * len(keys))()
        library.where(cache, (ctypes.c_uint64 * len(keys))(*keys), len(keys), num, out)
        assert all(out)
        return [address for address in out if address is not None]

    return where


def test_what_was_made_stays_while_others_come(where: Where) -> None:
    """One position after another, as a drafter looks at them, and then all at once, as they are verified."""
    first = [where(40, key)[0] for key in range(100)]
    assert len(set(first)) == 100
    assert where(40, *range(100)) == first
    assert where(30, *range(100)) == first  # the first tokens of more


def test_what_came_first_goes_first_but_not_what_is_wanted_now(where: Where) -> None:
    [oldest] = where(40, 0)
    most = next(key for key in range(1, 5000) if where(40, key) == [oldest])
    assert 100 < most < 5000
    assert where(40, 1, most + 1)[0] != where(40, most + 2)[0]  # the next to go is wanted meanwhile
    assert len(set(where(40, *range(10_000, 10_000 + 3 * most)))) == 3 * most


def test_memory_is_that_of_so_many_numbers_however_many_rows_there_were_before(where: Where) -> None:
    where(16, *range(3000))
    num = 150_000
    places = {where(num, key)[0] for key in range(1, 400)}
    assert len(places) * num <= 1 << 24
    assert len(set(where(num, *range(1, 130)))) == 129


def test_what_many_took_that_were_wanted_at_once_is_given_back(where: Where) -> None:
    num = 1 << 17  # of which 128 rows are kept
    assert len(set(where(num, *range(1, 201)))) == 200
    first = where(num, *range(1, 201))
    assert where(num, *range(1, 101)) == first[:100], "while half of them are wanted, or it is twice what is usual"
    assert len(set(where(num, *range(1, 400)))) == 399
    places = {where(num, key)[0] for key in range(1, 400)}
    assert len(places) == 128
