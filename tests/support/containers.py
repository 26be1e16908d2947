"""The stack of docker-compose.yml in containers, and seeded streams that must not notice what happens to it.

It needs a Docker engine with the image (make image), Docker Compose, and an image with Redis.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import docker
import grpc
from outrider.v1 import inference_pb2_grpc

from tests.support.service import Generated, generate, inference, running_stack

ROOT: Final = Path(__file__).parents[2]
PROJECT: Final = "outrider-test"
IMAGE: Final = os.environ.get("OUTRIDER_IMAGE", "outrider:latest")
START_SECONDS: Final = 300.0

NUM_STREAMS: Final = 8
NUM_PROMPTS: Final = 12
NUM_TOKENS: Final = 48
PROMPT: Final = "class Reader:\n    def __init__(self, path):\n        self.path = path\n"

# For what is the same in every batch.
_OVERRIDE = """
services:
  prefill: &target
    environment: {OUTRIDER_TARGET_DTYPE: float32}
  decode: *target
  draft:
    environment: {OUTRIDER_DRAFT_DTYPE: float32}
"""


def compose_command() -> list[str]:
    """Version 2 where there is one, else 1.29."""
    done = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False)
    return ["docker", "compose"] if done.returncode == 0 else ["docker-compose"]


class Containers:
    """The stack, as a test has it. `folder` holds its secrets, and what differs from the file as it is."""

    def __init__(self, folder: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = int(probe.getsockname()[1])
        self.secrets = folder / "secrets"
        self.engine = docker.from_env()
        self._override = folder / "override.yaml"
        self._override.write_text(_OVERRIDE)

    @property
    def address(self) -> str:
        return f"localhost:{self.port}"

    @property
    def api_key(self) -> str:
        return (self.secrets / "client" / "api-key").read_text().strip()

    def make_secrets(self) -> None:
        """Makes them, or the certificates anew."""
        self.secrets.mkdir(exist_ok=True)
        user = f"{os.getuid()}:{os.getgid()}"
        command = ["docker", "run", "--rm", "--network=none", f"--user={user}", f"--volume={self.secrets}:/secrets"]
        subprocess.run([*command, IMAGE, "secrets", "/secrets"], check=True, capture_output=True)

    def compose(self, *arguments: str, check: bool = True) -> str:
        """What the command said. Raises AssertionError if it failed."""
        files = [f"--file={ROOT / 'docker-compose.yml'}", f"--file={self._override}"]
        command = [*compose_command(), *files, f"--project-directory={ROOT}", f"--project-name={PROJECT}", *arguments]
        environment = {
            **os.environ,
            "OUTRIDER_IMAGE": IMAGE,
            "OUTRIDER_SECRETS": str(self.secrets),
            "OUTRIDER_PUBLISH": f"127.0.0.1:{self.port}",
            "OUTRIDER_NUM_THREADS": "1",
            # Caches that are soon as full as they get: what grows then is none.
            "OUTRIDER_KV_GIB": "0.125",
            "OUTRIDER_DRAFT_KV_GIB": "0.0625",
            "OUTRIDER_REDIS_MAXMEMORY": "192mb",
        }
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0 or not check, done.stdout + done.stderr
        return done.stdout

    def of(self, service: str = "") -> list[Any]:
        """Containers, of one service or all, that run or do not."""
        labels = [f"com.docker.compose.project={PROJECT}"]
        if service:
            labels.append(f"com.docker.compose.service={service}")
        found: list[Any] = self.engine.containers.list(all=True, filters={"label": labels})
        return sorted(found, key=lambda container: container.name)

    async def until_healthy(self, service: str = "") -> None:
        """Returns when every container, of one service or all, says that it is well. Raises AssertionError if one does
        not in time."""
        deadline = time.monotonic() + START_SECONDS
        while unwell := await asyncio.to_thread(self._unwell, service):
            assert time.monotonic() < deadline, unwell
            await asyncio.sleep(0.5)

    def _unwell(self, service: str) -> dict[str, str]:
        """What containers say that are not healthy, by name."""
        states = {each.name: _health(each) for each in self.of(service)}
        return {name: state for name, state in states.items() if state != "healthy"}

    @asynccontextmanager
    async def client(self) -> AsyncIterator[inference_pb2_grpc.InferenceAsyncStub]:
        """Over a connection of its own."""
        credentials = grpc.ssl_channel_credentials((self.secrets / "client" / "ca.pem").read_bytes())
        options = (("grpc.max_reconnect_backoff_ms", 1000), ("grpc.use_local_subchannel_pool", 1))
        async with grpc.aio.secure_channel(self.address, credentials, options) as channel:
            yield inference_pb2_grpc.InferenceStub(channel)

    def down(self) -> None:
        """Ends all, volumes included."""
        self.compose("down", "--volumes", "--timeout", "60", check=False)


def _health(container: Any) -> str:
    container.reload()
    health: Mapping[str, Any] = container.attrs["State"].get("Health", {})
    return str(health.get("Status", container.status))


@asynccontextmanager
async def running_containers(folder: Path) -> AsyncIterator[Containers]:
    """The stack, healthy; ended with nothing left, its logs in `folder` if a test failed meanwhile."""
    containers = Containers(folder)
    containers.down()
    containers.make_secrets()
    try:
        await asyncio.to_thread(containers.compose, "up", "--detach")
        await containers.until_healthy()
        yield containers
    finally:
        (folder / "logs").write_text(containers.compose("logs", "--no-color", check=False))
        await asyncio.to_thread(containers.down)
        shutil.rmtree(containers.secrets)


async def references() -> Mapping[int, Sequence[int]]:
    """What a stack of child processes says to each seed."""
    async with running_stack() as stack, inference(stack) as stub:
        return {seed: (await ask(stub, seed)).token_ids for seed in range(NUM_PROMPTS)}


async def ask(stub: inference_pb2_grpc.InferenceAsyncStub, seed: int, api_key: str | None = None) -> Generated:
    prompt = PROMPT + f"        self.number = {seed}\n"
    return await generate(stub, prompt, api_key=api_key, seed=seed, temperature=0.8, max_tokens=NUM_TOKENS)


@dataclass
class Load:
    """Streams one after another, `NUM_STREAMS` at a time; each must come out as its reference says.

    `errors`: of streams that broke off, by status; `forgiven`: whether they may, for the router itself is away.
    """

    containers: Containers
    expected: Mapping[int, Sequence[int]]
    num_streams: int = 0
    errors: list[grpc.StatusCode] = field(default_factory=list)
    forgiven: bool = False
    longest_seconds: float = 0.0

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Under load within; raises whatever a stream raised, at the end."""
        async with self.containers.client() as stub:
            tasks = [asyncio.create_task(self._stream(stub, first)) for first in range(NUM_STREAMS)]
            try:
                yield
                assert not [task for task in tasks if task.done()], [task.exception() for task in tasks if task.done()]
            finally:
                for task in tasks:
                    task.cancel()
                for task in tasks:
                    with suppress(asyncio.CancelledError):
                        await task

    async def more(self, num_streams: int, seconds: float = 120.0) -> None:
        """Returns when so many more have ended well."""
        wanted, deadline = self.num_streams + num_streams, time.monotonic() + seconds
        while self.num_streams < wanted:
            assert time.monotonic() < deadline, f"{wanted - self.num_streams} of {num_streams} streams are missing"
            await asyncio.sleep(0.1)

    async def _stream(self, stub: inference_pb2_grpc.InferenceAsyncStub, first: int) -> None:
        number = first
        while True:
            seed, began = number % NUM_PROMPTS, time.monotonic()
            try:
                generated = await ask(stub, seed, self.containers.api_key)
            except grpc.aio.AioRpcError as error:
                if not self.forgiven:
                    raise
                self.errors.append(error.code())
                await asyncio.sleep(0.2)
                continue
            assert generated.token_ids == self.expected[seed], f"seed {seed}"
            self.num_streams += 1
            self.longest_seconds = max(self.longest_seconds, time.monotonic() - began)
            number += NUM_STREAMS
