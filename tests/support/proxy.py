"""A TCP connection's bad days: bytes that are late, do not come, or a line that is cut."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress

_CHUNK_BYTES = 64 * 1024


class Proxy:
    """Stands before a server at `target` (host:port), on a port of its own.

    `delay_seconds`: how late each piece comes. `stall`: nothing comes until `resume`. `cut`: every connection ends.
    """

    def __init__(self, target: str) -> None:
        self.delay_seconds = 0.0
        self._target = target
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._server: asyncio.Server | None = None
        self._lines: set[asyncio.Task[None]] = set()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._socket.getsockname()[1]}"

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, sock=self._socket)

    def stall(self) -> None:
        self._flowing.clear()

    def resume(self) -> None:
        self._flowing.set()

    def cut(self) -> None:
        for line in self._lines:
            line.cancel()

    async def close(self) -> None:
        self.resume()
        if self._server is not None:
            self._server.close()
        self.cut()
        await asyncio.gather(*self._lines, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = asyncio.current_task()
        assert line is not None
        self._lines.add(line)
        host, _, port = self._target.rpartition(":")
        writers = [writer]
        try:
            with suppress(OSError, asyncio.CancelledError):
                onward_reader, onward_writer = await asyncio.open_connection(host, int(port))
                writers.append(onward_writer)
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._carry(reader, onward_writer))
                    group.create_task(self._carry(onward_reader, writer))
        except* OSError:
            pass
        finally:
            self._lines.discard(line)
            for each in writers:
                each.transport.abort()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Until either end closes, which ends both directions."""
        while data := await reader.read(_CHUNK_BYTES):
            if self.delay_seconds:
                await asyncio.sleep(self.delay_seconds)
            await self._flowing.wait()
            writer.write(data)
            await writer.drain()
        raise ConnectionError("closed")
