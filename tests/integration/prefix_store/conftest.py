"""The payload store as its tests want it: nothing in it is too fresh to go, and it may be had in small pieces."""

from __future__ import annotations

import pytest

from shared.prefix import store as store_module
from tests.support.payload_store import BLOCK_BYTES


@pytest.fixture(autouse=True)
def nothing_is_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was written a moment ago may go for what comes now."""
    monkeypatch.setattr(store_module, "_FRESH_SECONDS", 0.0)


@pytest.fixture
def in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts take three blocks, answers and transactions two."""
    monkeypatch.setattr(store_module, "_BATCH_BLOCKS", 3)
    monkeypatch.setattr(store_module, "_READ_BYTES", 2 * BLOCK_BYTES)
    monkeypatch.setattr(store_module, "_WRITE_BYTES", 2 * BLOCK_BYTES)
