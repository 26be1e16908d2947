"""How a request ends whose sequences end with one another."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from outrider.v1 import inference_pb2

from services.router.clients.request import GenerateOptions
from services.router.clients.usage import UsageMeter
from services.router.generation import session as session_module
from services.router.generation.session import Session
from services.router.text.tokenizer import TextTokenizer
from services.router.workers.fleet import Fleet
from shared.rpc.errors import Unavailable
from shared.sampling.params import SamplingParams
from shared.telemetry.tracing import Telemetry

Emit = Callable[[inference_pb2.GenerateResponse], None]


class Ending:
    """A sequence: the first fails at once, others tell the last of what they have some turns behind their
    cancellation."""

    def __init__(self, session: Session, params: SamplingParams, *_: Any) -> None:
        self._index = params.sequence_index

    async def run(self, emit: Emit) -> None:
        if self._index == 0:
            raise Unavailable("no worker")
        try:
            await asyncio.Event().wait()
        finally:
            for _ in range(9):
                await asyncio.sleep(0)
            emit(inference_pb2.GenerateResponse(index=self._index, text="last"))

    def release(self) -> None:
        """It has nothing."""


async def test_what_others_had_taken_when_one_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    params = tuple(SamplingParams(sequence_index=i) for i in range(3))
    options = SimpleNamespace(params=params, prompt_ids=(1,), num_draft_tokens=None, stop_strings=())

    async def begin(*_: Any) -> tuple[list[None], None]:
        return [None] * len(params), None

    session = Session(
        cast(GenerateOptions, options),
        cast(Fleet, None),
        cast(TextTokenizer, None),
        cast(UsageMeter, None),
        cast(Telemetry, None),
        b"",
        1.0,
    )
    monkeypatch.setattr(session, "begin", begin)
    monkeypatch.setattr(session, "_detokenizer", lambda: None)
    monkeypatch.setattr(session_module, "SequenceSession", Ending)
    written: list[int] = []

    async def write(chunk: inference_pb2.GenerateResponse) -> None:
        written.append(chunk.index)

    with pytest.raises(Unavailable):
        await session.run(write, lambda: None)
    assert written == [1, 2]
