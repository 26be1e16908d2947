"""One service of the local stack: a child process that is started again when it dies."""

from __future__ import annotations

import asyncio
import signal
import time
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process, create_subprocess_exec
from collections.abc import Callable, Mapping, Sequence

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]
from tenacity import AsyncRetrying, retry_if_exception_type, wait_random_exponential

from shared.rpc.channel import connect
from shared.settings import EXIT_CONFIG, StartupError

LogSink = Callable[[str, str], None]
"""Takes a process's name and one line of its output."""

MIN_BACKOFF_SECONDS = 0.5
MAX_BACKOFF_SECONDS = 15.0
KILL_GRACE_SECONDS = 5.0
"""What a process gets beyond its own drain time before it is killed."""


class NotServingError(Exception):
    """The process answers, and is not ready yet."""


class ServiceProcess:
    """A child process with a gRPC health service at `address`.

    `supervise` keeps it running; `ready` is set while it is SERVING. Its output goes line by line to
    `log`, its own session keeps a terminal's Ctrl-C from it.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        address: str,
        log: LogSink,
        connect: Callable[[str], grpc.aio.Channel] = connect,
    ) -> None:
        self.name = name
        self.address = address
        self.ready = asyncio.Event()
        self.restarts = 0
        self._command = command
        self._environment = environment
        self._log = log
        self._connect = connect
        self._stop = asyncio.Event()
        self._process: Process | None = None
        self._last_line = ""

    async def supervise(self, start_seconds: float) -> None:
        """Runs the process until `stop`, starting it again, with backoff, whenever it dies.

        Raises StartupError when it dies before it was ever SERVING, when it is not SERVING within
        `start_seconds` of its first start, or when it ever says (EXIT_CONFIG) that it cannot start.
        """
        served = False
        backoff = MIN_BACKOFF_SECONDS
        while True:
            started = time.monotonic()
            outcome, served_now = await self._run(start_seconds)
            if self._stop.is_set():
                return
            served = served or served_now
            if not served or outcome == EXIT_CONFIG:
                raise StartupError(self._obituary(outcome))
            if time.monotonic() - started > 2 * MAX_BACKOFF_SECONDS:
                backoff = MIN_BACKOFF_SECONDS
            self._log("stack", f"{self._obituary(outcome)}; starting it again in {backoff:.1f} s")
            try:
                await asyncio.wait_for(self._stop.wait(), backoff)
                return
            except TimeoutError:
                backoff = min(2 * backoff, MAX_BACKOFF_SECONDS)
                self.restarts += 1

    @property
    def pid(self) -> int | None:
        """Process id; None unless it runs."""
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    async def stop(self, drain_seconds: float) -> None:
        """Asks the process to drain, and kills it if it has not ended by then."""
        self._stop.set()
        self._signal(signal.SIGTERM)
        if self._process is not None:
            try:
                await asyncio.wait_for(self._process.wait(), drain_seconds + KILL_GRACE_SECONDS)
            except TimeoutError:
                self._log("stack", f"{self.name} has not drained in {drain_seconds:g} s: killed")
                self._signal(signal.SIGKILL)

    def kill(self) -> None:
        """Ends the process at once; `supervise` starts it again unless it was stopped."""
        self.ready.clear()
        self._signal(signal.SIGKILL)

    def restart(self) -> None:
        """Asks the process to drain and end; `supervise` starts it again unless it was stopped."""
        self.ready.clear()
        self._signal(signal.SIGTERM)

    def abandon(self) -> None:
        """Ends the process at once and for good."""
        self._stop.set()
        self.kill()

    async def _run(self, start_seconds: float) -> tuple[int, bool]:
        """One life of the process: its exit status, and whether it was ever SERVING."""
        self._last_line = ""
        self._process = await create_subprocess_exec(
            *self._command,
            env=self._environment,
            stdin=DEVNULL,
            stdout=PIPE,
            stderr=STDOUT,
            start_new_session=True,
            limit=1 << 20,
        )
        if self._stop.is_set():  # asked to stop while it was being started
            self._signal(signal.SIGTERM)
        output = asyncio.create_task(self._read_output(self._process))
        health = asyncio.create_task(self._watch_start(start_seconds))
        served = False
        try:
            await output
            status = await self._process.wait()
            served = health.done() and health.result()
        finally:
            self.ready.clear()
            health.cancel()
            output.cancel()
            await asyncio.gather(health, output, return_exceptions=True)
        return status, served

    async def _read_output(self, process: Process) -> None:
        assert process.stdout is not None
        async for raw in process.stdout:
            line = raw.decode(errors="replace").rstrip()
            if line:
                # A log record is no last word: what matters is a complaint or the end of a traceback.
                self._last_line = "" if line.startswith("{") else line
                self._log(self.name, line)

    async def _watch_start(self, start_seconds: float) -> bool:
        """Sets `ready` once the process is SERVING; kills it if that takes longer than `start_seconds`."""
        try:
            await asyncio.wait_for(self._wait_until_serving(), start_seconds)
        except TimeoutError:
            self._last_line = f"not ready within {start_seconds:g} s"
            self._signal(signal.SIGKILL)
            return False
        self.ready.set()
        return True

    async def _wait_until_serving(self) -> None:
        retrying = AsyncRetrying(
            retry=retry_if_exception_type((grpc.aio.AioRpcError, NotServingError)),
            wait=wait_random_exponential(multiplier=0.05, max=0.3),
        )
        async for attempt in retrying:
            with attempt:
                async with self._connect(self.address) as channel:
                    health = health_pb2_grpc.HealthStub(channel)
                    answer = await health.Check(health_pb2.HealthCheckRequest(), timeout=5)
                if answer.status != health_pb2.HealthCheckResponse.SERVING:
                    raise NotServingError

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(number)

    def _obituary(self, status: int) -> str:
        """How the process ended, and its last words."""
        last_words = self._last_line.removeprefix("outrider: ")
        if status == EXIT_CONFIG:
            return f"{self.name}: {last_words}"
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        return f"{self.name} {how}" + (f": {last_words}" if last_words else "")
