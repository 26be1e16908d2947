"""`outrider simulate`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.simulate_command import command
from tests.support.simulated_cluster import written


def test_the_command_simulates_and_writes_json(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    code, text = command(
        *("--prefill", "1", "--decode", "2", "--rate", "10", "--requests", "200", "--prefixes", "4"),
        *("--routing", "policy", "--routing", "affinity", "--json", str(path)),
    )
    assert code == 0, text
    assert "policy" in text
    runs = json.loads(path.read_text())
    assert [run["name"] for run in runs] == ["policy", "affinity"]
    assert all((run["num_prefill"], run["num_decode"], run["num_both"]) == (1, 2, 0) for run in runs)
    assert all(run["requests"] == 200 for run in runs)


def test_a_result_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    code, text = command("--requests", "10", "--json", str(tmp_path))
    assert code == 1
    assert text.endswith(f"outrider: {tmp_path} cannot be written: Is a directory\n")


def test_the_command_takes_costs_from_logs_of_steps(tmp_path: Path) -> None:
    # A step of any size takes 0.3 s, by one worker's log; by the other's 0.1.
    logs = []
    for name, seconds in (("slow", 0.3), ("fast", 0.1)):
        line = {"seconds": seconds, "sequences": 1, "prefill_tokens": 0, "prefill_attended": 0, "context_tokens": 0}
        steps = ({**line, "time": 10 * i, "tokens": 2**i} for i in range(11))
        logs += ["--step-log", str(written(tmp_path, "\n".join(map(json.dumps, steps)), name))]
    result = tmp_path / "result.json"
    found = []
    for chosen in (logs[:2], logs[2:], logs):
        code, text = command(*chosen, "--rate", "0.1", "--requests", "40", "--json", str(result))
        assert code == 0, text
        found.append(json.loads(result.read_text())[0]["tpot"]["mean"])
    assert found[0] == pytest.approx(0.3, rel=0.05)
    assert found[1] == pytest.approx(0.1, rel=0.05)
    assert found[1] < found[2] < found[0]


def test_the_command_finds_pool_sizes(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    options = ("--plan", "--rate", "30", "--requests", "300", "--output-variation", "0.2")
    code, text = command(*options, "--slo-ttft", "0.3", "--slo-tpot", "0.04", "--json", str(path))
    assert code == 0, text
    assert "goodput per worker" in text
    runs = json.loads(path.read_text())
    assert runs
    assert all(run["attainment"] >= 0.95 for run in runs)
    code, text = command(*options, "--slo-tpot", "0.001", "--most-workers", "4")
    assert code == 1
    assert text.endswith("outrider: no pools of up to 4 workers meet the SLOs\n")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--trace", "nowhere.csv"], "nowhere.csv"),
        (["--step-costs", "nowhere.json"], "nowhere.json"),
        (["--step-log", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--step-log", "one", "--step-costs", "other"], "--step-log and --step-costs both say what steps cost"),
        (["--plan", "--both", "3"], "--plan finds the pools: --prefill, --decode and --both are not for it"),
        (["--plan", "--routing", "policy", "--routing", "affinity"], "--plan takes one --routing"),
        (["--json", "nowhere/result.json"], "--json 'nowhere/result.json': there is no folder 'nowhere'"),
        (["--plot", "nowhere/result.png"], "--plot 'nowhere/result.png': there is no folder 'nowhere'"),
        (["--burstiness", "inf"], "less than or equal to"),
        (["--prompt-variation", "1e300"], "less than or equal to"),
        (["--prompt-tokens", "inf"], "less than or equal to"),
        (["--rate", "inf"], "less than or equal to"),
        (["--step-seconds", "inf"], "less than or equal to"),
        (["--prefill", "2"], "a service needs decode workers"),
        (["--kv-tokens", "64"], "a worker has room for 64 together"),
        (["--max-batch-tokens", "100"], "256 sequences do not fit a step of 100 tokens"),
    ],
)
def test_the_command_says_what_is_wrong(arguments: list[str], complaint: str) -> None:
    code, text = command(*arguments)
    assert code == 2
    assert complaint in text
