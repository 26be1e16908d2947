"""A short campaign of faults on pools; `make chaos` is the long one."""

from __future__ import annotations

import pytest

from tests.support.chaos import Campaign, chaos_stack

# The most that a stream may take with all that happens to it.
STREAM_SECONDS = 30.0


@pytest.mark.timeout(400)
async def test_streams_do_not_notice_faults() -> None:
    async with chaos_stack() as stack:
        campaign = Campaign(stack, seed=1)
        await campaign.run(num_faults=4)
    assert campaign.num_streams > 16
    assert campaign.longest_seconds < STREAM_SECONDS
