"""What every test has: stacks whose processes start warm."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from services.cli import process
from tests.support.warm_start import WarmStart


@pytest.fixture(autouse=True, scope="session")
def warm_start() -> Iterator[None]:
    warm = WarmStart()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "create_subprocess_exec", warm.spawn)
        yield
    warm.stop()
