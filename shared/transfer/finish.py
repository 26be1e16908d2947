"""Waiting for what must not be left half done."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


async def finish(work: Coroutine[Any, Any, None] | asyncio.Future[None]) -> None:
    """Awaits `work` to its end, also when cancelled meanwhile; the cancellation comes behind it."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not task.cancelled():
            task.exception()  # looked at: else asyncio logs that nobody did
        raise cancelled
    task.result()
