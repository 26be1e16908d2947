"""Channels to peers: shared while they are used, gone when they were not for long."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from shared.transfer import peer_channels
from shared.transfer.peer_channels import PeerChannels


def is_closed(channel: grpc.aio.Channel) -> bool:
    return channel.get_state() is grpc.ChannelConnectivity.SHUTDOWN


async def test_one_channel_for_each_peer() -> None:
    channels = PeerChannels()
    async with channels.to("a:1") as first, channels.to("b:1") as other, channels.to("a:1") as second:
        assert first is second
        assert first is not other
    async with channels.to("a:1") as again:
        assert again is first
    await channels.close()
    assert is_closed(first)
    assert is_closed(other)


async def test_those_not_used_for_long_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_channels, "_IDLE_SECONDS", 0.0)
    channels = PeerChannels()
    async with channels.to("a:1") as used:
        async with channels.to("b:1") as idle:
            pass
        await asyncio.sleep(0.001)
        async with channels.to("c:1"):
            pass
        assert not is_closed(used)
        assert is_closed(idle)
    await channels.close()
