"""A channel whose every call carries some metadata."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc


class AuthorizedChannel(grpc.aio.Channel):
    """Another channel, with metadata. In place of grpc's interceptors, which handle each message of a stream."""

    def __init__(self, channel: grpc.aio.Channel, metadata: Callable[[], tuple[tuple[str, str], ...]]) -> None:
        """`metadata` is asked at each call."""
        self._channel = channel
        self._metadata = metadata

    def unary_unary(self, *arguments: Any, **options: Any) -> Any:
        return self._authorized(self._channel.unary_unary(*arguments, **options))

    def unary_stream(self, *arguments: Any, **options: Any) -> Any:
        return self._authorized(self._channel.unary_stream(*arguments, **options))

    def stream_unary(self, *arguments: Any, **options: Any) -> Any:
        return self._authorized(self._channel.stream_unary(*arguments, **options))

    def stream_stream(self, *arguments: Any, **options: Any) -> Any:
        return self._authorized(self._channel.stream_stream(*arguments, **options))

    async def close(self, grace: float | None = None) -> None:
        await self._channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._channel.channel_ready()

    async def __aenter__(self) -> AuthorizedChannel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _authorized(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def authorized(*arguments: Any, metadata: Any = (), **options: Any) -> Any:
            return call(*arguments, metadata=(*(metadata or ()), *self._metadata()), **options)

        return authorized
