"""What the simulator reports."""

from __future__ import annotations

import io
import json
import math
import random
import sys
from collections import Counter
from pathlib import Path

import pytest
from rich.console import Console

from services.simulator.cluster import Pools
from services.simulator.outcomes import Outcomes, quantiles, weighted_quantiles
from services.simulator.report import Objectives, PlotUnavailable, drawing, plot, summarise, table
from services.simulator.workload import Request
from tests.support.simulated_cluster import busy_workload, run, step


def test_quantiles_are_the_least_values_that_so_many_are_not_above() -> None:
    assert quantiles([3.0, 1.0, math.nan, 2.0, 4.0], [0.25, 0.5, 0.51, 1.0]) == [1.0, 2.0, 3.0, 4.0]
    assert all(math.isnan(value) for value in quantiles([], [0.5]) + weighted_quantiles({}, [0.5]))
    rng = random.Random(0)
    weights = Counter(rng.randint(0, 9) / 10 for _ in range(100))
    shares = [0.01, 0.1, 0.5, 0.9, 0.99, 1.0]
    assert weighted_quantiles(weights, shares) == quantiles(weights.elements(), shares)


def small_run() -> Outcomes:
    return run(list(busy_workload(100).requests(0)), Pools(1, 2))


def test_a_summary_adds_up() -> None:
    outcomes = small_run()
    summary = summarise(outcomes, Objectives(0.1, 0.012))
    good = sum(t <= 0.1 and not p > 0.012 for t, p in zip(outcomes.ttft, outcomes.tpot, strict=True))
    assert 0 < good < 100
    assert summary.attainment == pytest.approx(good / 100)
    assert summary.goodput == pytest.approx(good / outcomes.seconds)
    assert summary.ttft.p50 <= summary.ttft.p90 <= summary.ttft.p99 <= max(outcomes.ttft)
    assert [worker.role for worker in summary.workers] == ["prefill", "decode", "decode"]
    assert all(0 < worker.utilisation <= 1 for worker in summary.workers)
    assert 0 < summary.prefix_hit_rate < 1


def test_a_summary_is_plain_json_even_of_one_token_each() -> None:
    summary = summarise(run([Request(0.0, 10, 1)]), Objectives(1.0, 0.05))
    values = json.loads(json.dumps(summary.as_json(), allow_nan=False))
    assert values["tpot"] == {"mean": None, "p50": None, "p90": None, "p99": None}
    assert values["ttft"]["p50"] == pytest.approx(step(10))
    assert values["attainment"] == 1.0


def test_a_table_has_a_column_for_each_run() -> None:
    summary = summarise(small_run(), Objectives(1.0, 0.05))
    one_token = summarise(run([Request(0.0, 10, 1)]), Objectives(1.0, 0.05))
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(table({"policy": summary, "other": one_token}))
    text = console.export_text()
    for expected in ("policy", "other", "TTFT p99", "TPOT p50", "inter-token p90", "busy, decode", "goodput"):
        assert expected in text
    assert f"{1000 * summary.ttft.p99:.1f} ms" in text


def test_without_matplotlib_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(PlotUnavailable, match="needs matplotlib, which is not installed: pip install matplotlib"):
        drawing()


def test_a_plot_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot(tmp_path / "plot.png", {"policy": small_run()}, Objectives(1.0, 0.05))
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
