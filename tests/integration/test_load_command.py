"""`outrider load` against a service that runs, and against none."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from typer.testing import CliRunner, Result

from services.cli.app import app
from services.cli.stack import Stack
from tests.support.service import running_stack, wait_until_idle

pytestmark = pytest.mark.asyncio(loop_scope="module")

SHORT = ("--prompt-tokens=24", "--output-tokens=6")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack() -> AsyncIterator[Stack]:
    environment = {"router": {"OUTRIDER_ROUTER_MAX_RUNNING": "1", "OUTRIDER_ROUTER_MAX_WAITING": "2"}}
    async with running_stack(environment, draft=None) as running:
        yield running


async def load(address: str, *options: str) -> Result:
    return await asyncio.to_thread(lambda: CliRunner().invoke(app, ["load", f"--address={address}", *options]))


async def test_every_request_is_served_and_told(stack: Stack, tmp_path: Path) -> None:
    path = tmp_path / "load.json"
    options = ("--rate=2", "--rate=4", "--requests=6", "--burstiness=0", "--prefixes=1", "--prefix-tokens=32")
    result = await load(stack.router_address, *SHORT, *options, f"--json={path}")
    assert result.exit_code == 0, result.output
    assert "2/s" in result.stdout
    runs: list[Any] = json.loads(path.read_text())
    assert [run["name"] for run in runs] == ["2/s", "4/s"]
    for run in runs:
        assert (run["sent"], run["errors"]) == (6, {})
        for answer in run["answers"]:
            assert answer["tokens"] == answer["num_output_tokens"]
            assert answer["ttft"] > 0
    # All prompts begin alike, and the first has left that in the cache.
    assert runs[1]["answers"][0]["cached_tokens"] == 32
    await wait_until_idle(stack)


async def test_the_loop_is_open(stack: Stack, tmp_path: Path) -> None:
    """One runs, two wait, and who comes next is not held back until there is room: it is turned away, and counted."""
    path = tmp_path / "load.json"
    result = await load(
        stack.router_address,
        "--prompt-tokens=24",
        "--output-tokens=100",
        "--output-variation=0",
        "--rate=200",
        "--requests=30",
        f"--json={path}",
    )
    assert result.exit_code == 0, result.output
    (run,) = json.loads(path.read_text())
    assert set(run["errors"]) == {"RESOURCE_EXHAUSTED"}
    assert run["sent"] == 30
    assert run["requests"] + run["errors"]["RESOURCE_EXHAUSTED"] == 30
    assert "failed, RESOURCE_EXHAUSTED" in result.stdout
    await wait_until_idle(stack)


async def test_a_trace_is_played(stack: Stack, tmp_path: Path) -> None:
    trace, path = tmp_path / "trace.jsonl", tmp_path / "load.json"
    lines = [{"time": 0.2 * i, "prompt_tokens": 10 + i, "output_tokens": 3 + i} for i in range(4)]
    trace.write_text("\n".join(map(json.dumps, lines)))
    result = await load(stack.router_address, f"--trace={trace}", f"--json={path}")
    assert result.exit_code == 0, result.output
    (run,) = json.loads(path.read_text())
    assert [(each["num_prompt_tokens"], each["tokens"]) for each in run["answers"]] == [
        (10, 3),
        (11, 4),
        (12, 5),
        (13, 6),
    ]


async def test_what_cannot_be_served_is_said_before(stack: Stack) -> None:
    result = await load(stack.router_address, "--prompt-tokens=100000", "--prompt-variation=0", "--requests=1")
    assert result.exit_code == 1
    assert "is beyond the" in result.stderr
    assert result.stderr.count("\n") == 1


async def test_nobody_there() -> None:
    result = await load("127.0.0.1:9", "--requests=1")
    assert (result.exit_code, result.stderr) == (1, "outrider: no server answers at 127.0.0.1:9\n")


async def test_options_that_do_not_go_together(tmp_path: Path) -> None:
    for options, complaint in (
        ((f"--trace={tmp_path}/x.jsonl", "--rate=2"), "--rate is not for it"),
        ((f"--json={tmp_path}/nowhere/x.json",), "there is no folder"),
    ):
        result = await load("127.0.0.1:9", *options)
        assert result.exit_code == 2
        assert complaint in " ".join(result.output.split())
