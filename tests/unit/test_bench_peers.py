"""Other engines beside the service: how they are spoken to, and what is made of their speeds."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.benchmarks.errors import BenchmarkError
from tests.benchmarks.model_pair import Pair
from tests.benchmarks.peers.__main__ import best_over_best
from tests.benchmarks.peers.engine import run_engine

ANSWERS = Path("tests/benchmarks/peers").resolve()
PAIR = Pair("pair", Path("target"), Path("draft"), lambda length: [1] * length)


def interpreter(folder: Path, generate: str) -> Path:
    """One that runs an engine of ours, whichever it is told to; `generate` is what that makes of prompts."""
    path = folder / "python"
    path.write_text(
        f"#!{sys.executable}\nimport sys\nsys.path.insert(0, {str(ANSWERS)!r})\nfrom answers import answer_lines\n"
        f"answer_lines(lambda: lambda prompts, num_tokens: {generate})\n"
    )
    path.chmod(0o755)
    return path


async def test_an_engine_is_timed_by_itself(tmp_path: Path) -> None:
    python = interpreter(tmp_path, "[print('noise') or prompt[:1] * num_tokens for prompt in prompts]")
    async with run_engine("vllm", python, PAIR, drafts=True) as engine:
        assert engine.name == "vllm, 4 drafted"
        assert 0 < await engine.load([[1, 2], [3]], 5) < 1
        assert 0 < await engine.load([[4]] * 32, 7) < 1


async def test_one_that_makes_too_few_tokens_measures_nothing(tmp_path: Path) -> None:
    async with run_engine("vllm", interpreter(tmp_path, "[[1]]"), PAIR, drafts=False) as engine:
        with pytest.raises(BenchmarkError, match="vllm, plain made 1 tokens where 10 were asked for"):
            await engine.load([[1], [2]], 5)


async def test_one_that_ends_says_why(tmp_path: Path) -> None:
    async with run_engine("openvino", interpreter(tmp_path, "1 // 0"), PAIR, drafts=False) as engine:
        with pytest.raises(BenchmarkError, match="openvino, plain ended with status 1: ZeroDivisionError"):
            await engine.load([[1]], 5)
    with pytest.raises(BenchmarkError, match=r"interpreter .*nowhere.*: No such file"):
        async with run_engine("openvino", tmp_path / "nowhere", PAIR, drafts=False):
            pass


def test_the_best_of_ours_is_held_against_the_best_of_theirs_within_each_repeat() -> None:
    speeds = {
        "openvino, plain": [10.0, 40.0],
        "vllm, plain": [20.0, 10.0],
        "outrider, off": [30.0, 10.0],
        "outrider, on": [10.0, 20.0],
    }
    assert best_over_best(speeds) == [1.5, 0.5]
