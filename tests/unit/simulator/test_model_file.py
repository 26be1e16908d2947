"""The file that describes several models, and the command that simulates them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from services.simulator.model import Model
from services.simulator.model_file import ModelsError, read_descriptions, read_models
from services.simulator.report import Objectives
from services.simulator.trace import TraceError, read_traces
from services.simulator.workload import Request
from tests.support.simulate_command import command
from tests.support.simulated_models import FLEET, KV_BYTES

# The file


DEFAULTS: dict[str, object] = {
    "kv_bytes_per_token": KV_BYTES,
    "step_seconds": 0.02,
    "tokens_per_second": 20_000.0,
    "step_costs": None,
    "rate": 4.0,
    "burstiness": 1.0,
    "prompt_tokens": 500.0,
    "prompt_variation": 1.0,
    "output_tokens": 200.0,
    "output_variation": 1.0,
    "slo_ttft": 1.0,
    "slo_tpot": 0.05,
}


def written(folder: Path, text: str, name: str = "models.toml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def read(path: Path, trace: Path | None = None, defaults: dict[str, object] = DEFAULTS) -> list[Model]:
    return read_models(path, defaults, num_requests=90, fleet=FLEET, prefixes=None, trace=trace, seed=0)


def test_models_are_read_with_what_they_leave_out(tmp_path: Path) -> None:
    text = "[chat]\nweights_gib = 16\nrate = 2\nslo_ttft = 3\n['org/code']\nweights_gib = 0.5\nstep_seconds = 0.01\n"
    chat, code = read(written(tmp_path, text))
    assert (chat.name, chat.weights_gib, chat.objectives) == ("chat", 16.0, Objectives(3.0, 0.05))
    assert (code.name, code.weights_gib, code.objectives) == ("org/code", 0.5, Objectives(1.0, 0.05))
    assert chat.costs.seconds(512) == pytest.approx(0.02 + 512 / 20_000)
    assert code.costs.seconds(512) == pytest.approx(0.01 + 512 / 20_000)
    # By their rates, over the same time, and each with bursts of its own.
    assert (len(chat.requests), len(code.requests)) == (30, 60)
    ratios = {round(one.time / other.time, 6) for one, other in zip(chat.requests, code.requests, strict=False)}
    assert len(ratios) == 30


def test_measured_steps_lie_beside_the_file(tmp_path: Path) -> None:
    written(tmp_path, "[[1, 0.5]]", "measured.json")
    elsewhere = written(tmp_path, "[[1, 0.25]]", "default.json")
    text = (
        "[a]\nweights_gib = 1\nstep_costs = 'measured.json'\n[b]\nweights_gib = 1\n"
        "[c]\nweights_gib = 1\nstep_seconds = 0.125\n"
    )
    models = read(written(tmp_path, text), defaults={**DEFAULTS, "step_costs": str(elsewhere)})
    assert [model.costs.seconds(1) for model in models] == pytest.approx([0.5, 0.25, 0.125 + 1 / 20_000])


def test_a_trace_has_the_requests_of_each_model(tmp_path: Path) -> None:
    models = written(tmp_path, "[a]\nweights_gib = 1\n[b]\nweights_gib = 1\n")
    rows = "time,prompt_tokens,output_tokens,model\n107,10,20,a\n105,30,4,b\n106,5,6,a\n"
    first, second = read(models, written(tmp_path, rows, "trace.csv"))
    # Counted from the first of all.
    assert first.requests == [Request(1.0, 5, 6), Request(2.0, 10, 20)]
    assert second.requests == [Request(0.0, 30, 4)]


@pytest.mark.parametrize(
    ("rows", "complaint"),
    [
        ("1,1,1,a\n2,1,1,z\n", "line 3: field model is 'z': must be one of 'a', 'b'"),
        ("1,1,1,a\n2,1,1,\n", "line 3: field model is missing"),
        ("1,1,1,a\n", "no requests of model 'b'"),
    ],
)
def test_a_trace_that_does_not_go_with_the_models(tmp_path: Path, rows: str, complaint: str) -> None:
    path = written(tmp_path, f"time,prompt_tokens,output_tokens,model\n{rows}", "trace.csv")
    with pytest.raises(TraceError) as raised:
        read_traces(path, ["a", "b"])
    assert str(raised.value) in (f"{path}, {complaint}", f"{path}: {complaint}")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[chat", ": not TOML: "),
        ("", ": no models: must have a table for each"),
        ("rate = 4", ": 'rate' is 4: must be the table of a model, [rate]"),
        ("[a]\nrate = 1", ", model 'a': field weights_gib is missing"),
        ("[a]\nweights_gib = -1", ", model 'a': field weights_gib is -1: must be greater than or equal to 0"),
        ("[a]\nweights_gib = '16'", ", model 'a': field weights_gib is '16': must be a valid number"),
        ("[a]\nweights_gib = true", ", model 'a': field weights_gib is True: must be a valid number"),
        ("[a]\nweights_gib = inf", ", model 'a': field weights_gib is inf: must be a finite number"),
        ("[a]\nweights_gib = 1\nslo_ttfb = 1", ", model 'a': field slo_ttfb is not known: must be one of weights_gib,"),
        ("[a]\nweights_gib = 1\nrate = 0", ", model 'a': field rate is 0: must be greater than 0"),
        ("[a]\nweights_gib = 1\nstep_costs = 5", ", model 'a': field step_costs is 5: must be a valid string"),
        (
            "[a]\nweights_gib = 81",
            ", model 'a': field weights_gib is 81: a worker of 80 GiB must have room for 81",
        ),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, complaint: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ModelsError) as raised:
        read(path)
    assert str(raised.value).startswith(f"{path}{complaint}")
    assert "\n" not in str(raised.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelsError, match=r"nowhere\.toml: .*No such file"):
        read_descriptions(tmp_path / "nowhere.toml", DEFAULTS)


# The command


def test_the_command_finds_a_placement_and_writes_json(tmp_path: Path) -> None:
    models = written(
        tmp_path, "[chat]\nweights_gib = 16\nrate = 6\n[code]\nweights_gib = 30\nrate = 2\nburstiness = 4\n"
    )
    paths = [tmp_path / name for name in ("one.json", "other.json")]
    for path in paths:
        code, text = command(
            *("--models", str(models), "--both", "3", "--plan", "--requests", "120", "--slo-tpot", "0.03"),
            *("--json", str(path)),
        )
        assert code == 0, text
        for expected in ("dedicated", "everywhere", "found", "worker-2", "within both SLOs, code", "least of the"):
            assert expected in text
    assert paths[0].read_bytes() == paths[1].read_bytes()
    runs = json.loads(paths[0].read_text())
    assert [run["name"] for run in runs] == ["dedicated", "everywhere", "found"]
    assert runs[0]["workers"] == [["chat"], ["chat"], ["code"]]
    for each in runs:
        assert sum(model["requests"] for model in each["models"].values()) == 120
        assert each["least_attainment"] == min(model["attainment"] for model in each["models"].values())
        assert each["models"]["chat"]["slo_tpot"] == 0.03


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--both", "0"], "several models need workers that do both: at least 1, not 0"),
        (["--worker-gib", "10"], "a worker of 10 GiB must have room for"),
        (["--prefill", "2"], "--prefill is for one model, not for --models"),
        (["--kv-tokens", "64"], "--kv-tokens is for one model, not for --models"),
        (["--max-batch-tokens", "100"], "256 sequences do not fit a step of 100 tokens"),
        (["--trace", "nowhere.csv"], "nowhere.csv"),
    ],
)
def test_the_command_says_what_is_wrong(tmp_path: Path, arguments: list[str], complaint: str) -> None:
    models = written(tmp_path, "[chat]\nweights_gib = 16\n")
    code, text = command("--models", str(models), *arguments)
    assert code == 2
    assert complaint in text
