"""One of two real target workers hangs, stands still or fails at everything: clients hardly notice."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest
import pytest_asyncio
from outrider.v1 import inference_pb2

from services.cli.stack import Stack, StackSettings
from shared.security.identity import Service
from shared.worker.failure import EXIT_FAILED
from tests.support.faulty_target import FAIL, FAULT_FILE, HANG
from tests.support.service import OnChunk, generate, inference, wait_until_idle, worker_state

pytestmark = pytest.mark.asyncio(loop_scope="module")

NUM_STREAMS = 16
NUM_TOKENS = 128
FAULTY, HEALTHY = "target-0", "target-1"
# The most that a stream may stand still, and when nothing new may be placed on a worker that does.
STANDSTILL_SECONDS = 15.0
PLACED_SECONDS = 6.5
RESTART_SECONDS = 120.0


class FaultyStack(Stack):
    """Its first target is a `tests.support.faulty_target`."""

    def _add(self, name: str, address: str, flags: Mapping[str, object], *, service: Service) -> None:
        super()._add(name, address, flags, service=service)
        if name == FAULTY:
            process = self.processes[name]
            process._command = [sys.executable, "-m", "tests.support.faulty_target", *process._command[3:]]

    @property
    def fault_file(self) -> Path:
        return Path(self.settings.environment[FAULTY][FAULT_FILE])

    def send_signal(self, name: str, number: signal.Signals) -> None:
        self.processes[name]._signal(number)

    def logged(self, name: str, message: str) -> list[dict[str, str]]:
        """What a process logged that begins so."""
        records = [json.loads(line) for process, line in self.lines if process == name and line.startswith("{")]
        return [record for record in records if record["message"].startswith(message)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[FaultyStack]:
    file = str(tmp_path_factory.mktemp("fault") / "fault")
    settings = StackSettings(
        num_targets=2,
        port=0,
        dtype="float32",
        num_threads=1,
        drain_seconds=5.0,
        environment={FAULTY: {FAULT_FILE: file}},
    )
    async with FaultyStack(settings) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def expected(stack: FaultyStack) -> list[list[int]]:
    """What each stream gives while nothing is wrong."""
    return await asyncio.gather(*(stream(stack, index) for index in range(NUM_STREAMS)))


async def stream(stack: FaultyStack, index: int, on_chunk: OnChunk | None = None) -> list[int]:
    """The tokens of one of the streams that all tests run: seeded, some of them drafted for."""
    async with inference(stack) as stub:
        answer = await generate(
            stub,
            f"def f{index}(items):\n    ",
            gamma=(0, 2, None)[index % 3],
            on_chunk=on_chunk,
            max_tokens=NUM_TOKENS,
            temperature=0.8,
            seed=index,
            ignore_eos=True,
        )
    return answer.token_ids


class Pace:
    """The longest that a stream stood still."""

    def __init__(self) -> None:
        self.longest = 0.0
        self.started = asyncio.Event()
        self._latest = time.monotonic()

    def __call__(self, _: inference_pb2.GenerateResponse) -> None:
        now = time.monotonic()
        self.longest = max(self.longest, now - self._latest)
        self._latest = now
        self.started.set()


async def stream_until_restarted(stack: FaultyStack, restarts: int, expected: list[list[int]]) -> None:
    """Runs all streams again and again until the faulty target, started again `restarts` times so far, has ended
    itself, and is serving again."""
    process = stack.processes[FAULTY]
    async with asyncio.timeout(RESTART_SECONDS):
        while process.restarts == restarts:
            paces = [Pace() for _ in expected]
            streams = (stream(stack, index, pace) for index, pace in enumerate(paces))
            assert await asyncio.gather(*streams) == expected
            assert max(pace.longest for pace in paces) < STANDSTILL_SECONDS
        await process.ready.wait()
    assert process.restarts == restarts + 1
    assert any(f"{FAULTY} ended with status {EXIT_FAILED}" in line for name, line in stack.lines if name == "stack")


async def test_a_worker_that_is_stopped_costs_its_streams_seconds(
    stack: FaultyStack, expected: list[list[int]]
) -> None:
    paces = [Pace() for _ in expected]
    streams = [asyncio.create_task(stream(stack, index, pace)) for index, pace in enumerate(paces)]
    for pace in paces:
        await pace.started.wait()
    # The one with more of them: placement goes by measured costs, and may leave the other nearly none.
    there = {name: (await worker_state(stack, name)).num_sequences for name in (FAULTY, HEALTHY)}
    stopped = max(there, key=lambda name: there[name])
    assert there[stopped] > NUM_STREAMS // 4
    num_lost = len(stack.logged("router", "sequence lost"))
    stack.send_signal(stopped, signal.SIGSTOP)
    try:
        await asyncio.sleep(PLACED_SECONDS)
        late = await asyncio.gather(*(stream(stack, index) for index in range(NUM_STREAMS // 2)))
        assert await asyncio.gather(*streams) == expected
        assert late == expected[: NUM_STREAMS // 2]
        # Those that were there, and none that came later.
        lost = stack.logged("router", "sequence lost")[num_lost:]
        assert 0 < len(lost) <= there[stopped]
        assert {record["address"] for record in lost} == {stack.processes[stopped].address}
        assert max(pace.longest for pace in paces) < STANDSTILL_SECONDS
    finally:
        stack.send_signal(stopped, signal.SIGCONT)
    # Awake again it finds its stream ended, and lets go of what it had.
    await wait_until_idle(stack)
    assert stack.processes[stopped].restarts == 0


async def test_a_worker_whose_engine_hangs_ends_itself(stack: FaultyStack, expected: list[list[int]]) -> None:
    restarts = stack.processes[FAULTY].restarts
    stack.fault_file.write_text(HANG)
    await stream_until_restarted(stack, restarts, expected)
    [record] = stack.logged(FAULTY, "the engine's thread hangs")
    assert record["level"] == "CRITICAL"
    assert "hang_for_ever" in record["stack"]
    await wait_until_idle(stack)


async def test_a_worker_whose_every_step_fails_ends_itself_and_fails_nobody(
    stack: FaultyStack, expected: list[list[int]]
) -> None:
    restarts = stack.processes[FAULTY].restarts
    stack.fault_file.write_text(FAIL)
    for index in range(10):
        assert await stream(stack, index) == expected[index]
    await stream_until_restarted(stack, restarts, expected)
    [record] = stack.logged(FAULTY, "the engine's thread ended by an error")
    assert record["level"] == "CRITICAL"
    assert "3 steps in a row failed" in record["exception"]
    assert await asyncio.gather(*(stream(stack, index) for index in range(NUM_STREAMS))) == expected
    await wait_until_idle(stack)
