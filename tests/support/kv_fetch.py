"""Prompts whose KV one worker fetches from another, and why a fetch failed."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from shared.engine.kv_import import KVImport
from shared.engine.sequence import Sequence as EngineSequence
from shared.transfer.engine import TransferFailed
from tests.support.kv_engine import KVWorker
from tests.support.machine import ROOT, VOCAB_SIZE
from tests.support.router_stack import until

TICKET = b"t" * 16


def prompt_of(length: int) -> list[int]:
    return [7 * i % VOCAB_SIZE for i in range(length)]


async def begin_import(worker: KVWorker, prompt: list[int]) -> KVImport:
    return await worker.loop.ask(lambda: worker.engine.scheduler.begin_import(prompt, ROOT))


async def until_drawn(sequences: Sequence[EngineSequence]) -> None:
    await until(lambda: all(len(each.token_ids) > each.num_prompt_tokens for each in sequences), "first tokens drawn")


async def failure(d: KVWorker, address: str, prompt: list[int], ticket: bytes | None = TICKET) -> str:
    """Why a fetch failed; whatever it held is given back by then."""
    kv_import = await begin_import(d, prompt)
    with pytest.raises(TransferFailed) as caught:
        await d.fetcher.fetch(kv_import, address, ticket)
    assert kv_import.ended
    await d.loop.ask(lambda: d.engine.scheduler.imports.drop(kv_import))
    await d.until_idle()
    return str(caught.value)
