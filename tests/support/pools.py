"""Stacks of prefill and decode workers, with each engine that moves KV between them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import pytest

from services.cli.stack import Stack
from shared.transfer.nixl import nixl_available
from tests.support.service import running_stack


class Pools(NamedTuple):
    """How many workers prefill, decode, and do both."""

    num_prefill: int
    num_decode: int
    num_both: int = 0


_NIXL = pytest.mark.skipif(not nixl_available(), reason="nixl is not installed")
_SMALL, _LARGE, _MIXED = Pools(1, 1), Pools(2, 2), Pools(1, 1, 1)


def _case(pools: Pools, engine: str, *marks: pytest.MarkDecorator) -> Any:
    return pytest.param((pools, engine), id=f"{engine}-{'-'.join(map(str, pools))}", marks=marks)


# A stack takes its time to start: each pool and each engine is in the suite, every pair of them in the long tests.
POOLS_AND_ENGINES = [
    _case(_SMALL, "nixl", _NIXL),
    _case(_MIXED, "grpc"),
    _case(_LARGE, "nixl", _NIXL),
    _case(_SMALL, "grpc", pytest.mark.long),
    _case(_LARGE, "grpc", pytest.mark.long),
    _case(_MIXED, "nixl", _NIXL, pytest.mark.long),
]


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
