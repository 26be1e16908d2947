"""What the client gets of results, and when: behind what workers are told, unless the text decides what that is."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
from outrider.v1 import inference_pb2, target_pb2, worker_pb2

from services.router.clients.usage import UsageMeter
from services.router.generation.sequence_output import SequenceOutput
from services.router.generation.session import Session
from services.router.text.detokenizer import Detokenizer
from shared.sampling.params import SamplingParams
from shared.telemetry.metrics import RouterMetrics
from shared.telemetry.tracing import configure

NOTHING = worker_pb2.Proposal()
STOP = inference_pb2.FINISH_REASON_STOP
LENGTH = inference_pb2.FINISH_REASON_LENGTH


class Letters:
    """A tokenizer of letters: token 0 is "a"."""

    text_ids = range(26)

    def decode(self, token_ids: Any) -> str:
        return "".join(chr(ord("a") + each) for each in token_ids)


class Bench:
    """An output, and the chunks that it told its client; `broken`: not now."""

    def __init__(self, *stop_strings: str) -> None:
        self.chunks: list[inference_pb2.GenerateResponse] = []
        self.broken = False
        self.usage = UsageMeter(RouterMetrics(configure("router", None).meter, "tiny"), "chat")
        session = SimpleNamespace(usage=self.usage, options=SimpleNamespace(include_draft_tokens=False))
        detokenizer = Detokenizer(cast(Any, Letters()), stop_strings)
        params = SamplingParams(temperature=0.0)
        self.output = SequenceOutput(cast(Session, session), params, detokenizer, self._emit)

    def take(self, *token_ids: int, status: Any = target_pb2.STEP_STATUS_RUNNING) -> tuple[list[int], int]:
        tokens, reason = self.output.take(target_pb2.StepResult(token_ids=token_ids, status=status), NOTHING)
        return list(tokens), reason

    @property
    def texts(self) -> list[str]:
        return [chunk.text for chunk in self.chunks]

    def _emit(self, chunk: inference_pb2.GenerateResponse) -> None:
        if self.broken:
            raise RuntimeError("a bug")
        self.chunks.append(chunk)


async def test_workers_are_told_first() -> None:
    bench = Bench()
    told = []
    wake = asyncio.Event()

    async def write() -> None:
        await wake.wait()
        told.append(len(bench.chunks))

    writer = asyncio.create_task(write())
    await asyncio.sleep(0)
    assert bench.take(0, 1) == ([0, 1], 0)
    wake.set()
    await writer
    await asyncio.sleep(0)
    assert (told, bench.texts) == ([0], ["ab"])


async def test_several_results_at_once_keep_their_order() -> None:
    bench = Bench()
    for token in range(3):
        bench.take(token)
    bench.output.tell()
    assert bench.texts == ["a", "b", "c"]
    for _ in range(3):
        await asyncio.sleep(0)
    assert bench.texts == ["a", "b", "c"]


async def test_the_end_comes_behind_all_that_was_taken() -> None:
    bench = Bench()
    bench.take(0)
    assert bench.take(1, status=target_pb2.STEP_STATUS_LENGTH) == ([1], LENGTH)
    assert bench.texts == ["a", "b"]
    assert [chunk.finish_reason for chunk in bench.chunks] == [0, LENGTH]


async def test_a_text_that_may_end_the_sequence_is_looked_at_at_once() -> None:
    bench = Bench("bc")
    assert bench.take(0) == ([0], 0)
    assert bench.texts == ["a"]
    assert bench.take(1, 2, 3) == ([1, 2], STOP)
    assert bench.texts == ["a", ""]


async def test_text_that_cannot_be_made_fails_the_request_at_the_next_result(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    bench.broken = True
    bench.take(0)
    bench.take(1)
    for _ in range(3):
        await asyncio.sleep(0)
    assert "what a client is to get could not be made" in caplog.text
    bench.broken = False
    for _ in range(2):
        with pytest.raises(RuntimeError, match="a bug"):
            bench.take(2)
    # Told of nothing behind what it was not told of, and nothing is counted twice.
    bench.output.tell()
    assert bench.texts == []
    assert bench.usage.to_proto().output_tokens == 1


async def test_text_that_cannot_be_made_at_the_end_fails_the_request() -> None:
    bench = Bench()
    bench.broken = True
    bench.take(0)
    with pytest.raises(RuntimeError, match="a bug"):
        bench.take(1, status=target_pb2.STEP_STATUS_STOPPED)
    bench.broken = False
    bench.output.tell()
    assert bench.texts == []
