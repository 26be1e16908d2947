"""Stacks of prefill and decode workers, with each engine that moves KV between them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import pytest

from services.cli.stack import Stack
from shared.transfer.nixl.library import nixl_available
from tests.support.service import running_stack


class Pools(NamedTuple):
    """How many workers prefill, decode, and do both."""

    num_prefill: int
    num_decode: int
    num_both: int = 0


SMALL, LARGE, MIXED = Pools(1, 1), Pools(2, 2), Pools(1, 1, 1)


def pools_and_engines(*in_suite: tuple[Pools, str]) -> list[Any]:
    """Parameters: every kind of pools with every engine. A stack takes its time to start, so but for those named they
    are among the long tests."""
    return [
        pytest.param((pools, engine), id=f"{engine}-{'-'.join(map(str, pools))}", marks=_marks(pools, engine, in_suite))
        for pools in (SMALL, LARGE, MIXED)
        for engine in ("grpc", "nixl")
    ]


def _marks(pools: Pools, engine: str, in_suite: Collection[tuple[Pools, str]]) -> list[pytest.MarkDecorator]:
    missing = engine == "nixl" and not nixl_available()
    marks = [pytest.mark.skip(reason="nixl is not installed")] if missing else []
    return marks if (pools, engine) in in_suite else [*marks, pytest.mark.long]


@asynccontextmanager
async def running_pools(pools: Pools, engine: str, **settings: Any) -> AsyncIterator[Stack]:
    """Those that decode take steps of 32 tokens at most: they are slow at prompts, and get only the short ones."""
    moved = {"OUTRIDER_TARGET_KV_TRANSFER": engine}
    small = moved | {"OUTRIDER_TARGET_MAX_BATCH_TOKENS": "32"}
    environment = {f"prefill-{i}": moved for i in range(pools.num_prefill)}
    environment |= {f"decode-{i}": small for i in range(pools.num_decode)}
    environment |= {f"target-{i}": small for i in range(pools.num_both)}
    async with running_stack(
        environment,
        num_prefill=pools.num_prefill,
        num_decode=pools.num_decode,
        num_targets=pools.num_both,
        **settings,
    ) as running:
        yield running
