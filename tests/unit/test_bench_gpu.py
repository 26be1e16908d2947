"""`make bench-gpu`, without a GPU: its tables of a tiny model, which nobody times."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from rich.table import Table

from tests.benchmarks import gpu
from tests.benchmarks.gpu import Shape

TINY = Shape(hidden=64, layers=2, heads=8, mlp=96, tied=True)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def untimed(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_once(run: Callable[[], object], *_: torch.device) -> float:
        run()
        return 0.5

    monkeypatch.setattr(gpu, "_seconds", run_once)
    monkeypatch.setattr(gpu, "_host_seconds", run_once)
    monkeypatch.setattr(gpu, "_STREAMS", (1, 3))
    monkeypatch.setattr(gpu, "_CONTEXT", 90)


def column(table: Table, place: int) -> list[str]:
    return [str(cell) for cell in table.columns[place].cells]


def test_decoding_is_measured_in_three_ways() -> None:
    assert column(gpu._decoding("tiny", TINY, CPU, 1e9), 2) == ["2", "2", "2"]


def test_streams_are_measured_together() -> None:
    assert column(gpu._streams("tiny", TINY, CPU, 1e9), 2) == ["2", "6"]


def test_rounds_bring_what_the_closed_form_says() -> None:
    table = gpu._rounds(TINY, TINY, CPU)
    assert column(table, 0) == ["1", "2", "3", "4", "6", "8"]
    # A round takes two steps here: (1 + 0.6) / 2 and (1 + 0.9 + ... + 0.9^8) / 2.
    assert column(table, 3)[0] == "0.80"
    assert column(table, 5)[-1] == "3.06"
