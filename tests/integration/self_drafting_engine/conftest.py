"""Engines that draft for themselves, of which nothing fails unless a test says so."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def nothing_fails(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """A source that is left out would make every text right."""
    yield
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
