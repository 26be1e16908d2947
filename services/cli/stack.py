"""The local stack: Redis, a draft worker, target workers and a router, each a child process."""

from __future__ import annotations

import asyncio
import os
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

from services.cli.launcher import PARENT, worker_environment
from services.cli.ports import claim_port, free_ports
from services.cli.process import LogSink, ServiceProcess
from services.draft.settings import NO_MODEL, DraftSettings
from services.router.settings import RouterSettings
from services.target.settings import TargetSettings
from shared.engine.source import check_source
from shared.models import DEMO_DRAFT, DEMO_TARGET
from shared.redis.server import RedisServer, RedisServerError
from shared.registry.keys import DEFAULT_DEPLOYMENT
from shared.security.identity import PLAIN, Identity, Service
from shared.security.pem import parse_authorities, parse_chain
from shared.security.watched_files import WatchedFiles
from shared.settings import ServiceSettings, StartupError

LOOPBACK = "127.0.0.1"

_REDIS_WATCH_SECONDS = 0.5

_SETTINGS: dict[Service, type[ServiceSettings]] = {
    "router": RouterSettings,
    "target": TargetSettings,
    "draft": DraftSettings,
}

# Of one machine's or device's memory: what all workers may take, and the drafter, which is the smaller model.
_MEMORY_SHARE = 0.9
_DRAFT_MEMORY_SHARE = 0.2


@dataclass(frozen=True, slots=True)
class StackSettings:
    """What the stack is made of.

    `draft` None leaves the drafter out; "none" is one without a model. With `num_drafts` 0 the model `draft` runs
    inside the target workers; or a `head` drafts there, or their first `early_exit` layers. With `num_prefill` and
    `num_decode` the target workers are two pools, and `num_targets` more that do either (None: one, or beside pools
    none). With `prefix_store` the stack's Redis keeps prefix blocks themselves, too; with `certs`, a folder that
    `outrider certs` filled, all connections are TLS. `host` and `port` are the router's (0 picks a free one); workers
    listen on free ports of the loopback alone. Options left None are each service's own to settle, from the
    environment or its default; `environment` adds to it for single processes, by name ("router", "draft", "target-0",
    ...).
    """

    target: str = str(DEMO_TARGET)
    draft: str | None = str(DEMO_DRAFT)
    head: str | None = None
    early_exit: int | None = None
    num_targets: int | None = None
    num_prefill: int = 0
    num_decode: int = 0
    num_drafts: int = 1
    prefix_store: bool = False
    host: str = "127.0.0.1"
    port: int = 50051
    device: str | None = None
    dtype: str | None = None
    num_threads: int | None = None
    config: str | None = None
    certs: Path | None = None
    environment: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    start_seconds: float = 300.0
    drain_seconds: float = 30.0


class Stack:
    """The stack as an asynchronous context manager: entered when every service is SERVING, left when all have ended.

    Entering raises StartupError when a service cannot start. `log` gets every line of the children's
    output; the last ones are kept in `lines`.
    """

    def __init__(self, settings: StackSettings, log: LogSink | None = None) -> None:
        self.settings = settings
        self.lines: deque[tuple[str, str]] = deque(maxlen=10_000)
        self.processes: dict[str, ServiceProcess] = {}
        self._log_sink = log
        # Whose health is asked for is asked as the router.
        self._identity = PLAIN if settings.certs is None else router_identity(settings.certs)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        # Said once, not for every process of a service.
        self._unused: set[tuple[Service, str]] = set()
        self._redis: RedisServer | None = None
        self._keeping_redis: asyncio.Task[None] | None = None

    @property
    def redis(self) -> RedisServer:
        """The stack's own Redis, once the stack has been entered."""
        assert self._redis is not None
        return self._redis

    @property
    def router_address(self) -> str:
        return self.processes["router"].address

    async def __aenter__(self) -> Self:
        try:
            self._start_redis()
            self._keeping_redis = asyncio.create_task(self._keep_redis(self.redis), name="redis")
            workers = self._make_processes()
            await self._start(workers)
            await self._start(["router"])
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stop()

    async def wait(self) -> None:
        """Runs until a service fails for good; raises its StartupError."""
        done, _ = await asyncio.wait(self._tasks.values(), return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()

    def kill(self, name: str) -> None:
        """Kills a process as a crash would; it is started again, and its `ready` set when it is back."""
        self.processes[name].kill()

    def restart(self, name: str) -> None:
        """Has a process drain and end; it is started again."""
        self.processes[name].restart()

    async def stop(self) -> None:
        """Drains the router, then the workers, and ends Redis. Cancelled, it kills what is left instead."""
        drain = self.settings.drain_seconds
        try:
            if "router" in self._tasks:
                await self.processes["router"].stop(drain)
            await asyncio.gather(*(self.processes[name].stop(drain) for name in self._tasks))
        finally:
            for process in self.processes.values():
                process.abandon()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)
            if self._keeping_redis is not None:
                self._keeping_redis.cancel()
                await asyncio.gather(self._keeping_redis, return_exceptions=True)
            if self._redis is not None:
                self._redis.stop()

    def _start_redis(self) -> None:
        try:
            self._redis = RedisServer()
            self._redis.start()
        except RedisServerError as error:
            raise StartupError(str(error)) from error

    async def _keep_redis(self, redis: RedisServer) -> None:
        """Starts Redis again, at the same address, whenever it dies; the workers publish their blocks again."""
        while True:
            await asyncio.sleep(_REDIS_WATCH_SECONDS)
            if redis.pid is not None:
                continue
            self._log("stack", "redis ended; starting it again")
            try:
                # One start that is cut off must not be left behind by the stop that follows.
                await asyncio.shield(asyncio.to_thread(redis.start))
            except RedisServerError as error:
                self._log("stack", f"redis: {error}")

    async def _start(self, names: Sequence[str]) -> None:
        """Starts processes and waits until all are SERVING. Raises StartupError if one, or an earlier one, fails."""
        for name in names:
            supervise = self.processes[name].supervise(self.settings.start_seconds)
            self._tasks[name] = asyncio.create_task(supervise, name=name)
        ready = asyncio.create_task(self._wait_until_ready(names))
        try:
            await asyncio.wait([ready, *self._tasks.values()], return_when=asyncio.FIRST_COMPLETED)
            if not ready.done():
                await self.wait()
        finally:
            ready.cancel()

    async def _wait_until_ready(self, names: Sequence[str]) -> None:
        for name in names:
            await self.processes[name].ready.wait()

    def _make_processes(self) -> list[str]:
        """Makes, and does not start, every process; returns the workers' names. Raises StartupError for a folder of a
        model or head that is not there, which the workers would find seconds later."""
        settings = self.settings
        for source in (settings.target, settings.draft, settings.head):
            if source is not None and source != NO_MODEL:
                check_source(source)
        targets = self._targets()
        num_drafts = 0 if settings.draft is None else settings.num_drafts
        drafts = ["draft" if i == 0 else f"draft-{i}" for i in range(num_drafts)]
        workers = drafts + targets
        address = {
            name: f"{LOOPBACK}:{port}" for name, port in zip(workers, free_ports(LOOPBACK, len(workers)), strict=True)
        }
        address["router"] = f"{settings.host}:{claim_port(settings.host, settings.port)}"

        engine = {"device": settings.device, "dtype": settings.dtype, "num_threads": settings.num_threads}
        inside = settings.draft if settings.num_drafts == 0 and settings.draft != NO_MODEL else None
        own_drafts = {"draft": inside, "head": settings.head, "early_exit": settings.early_exit}
        for name in targets:
            role = name.partition("-")[0]
            self._add(
                name,
                address[name],
                {"model": settings.target, "role": None if role == "target" else role, **own_drafts, **engine},
                service="target",
            )
        for name in drafts:
            self._add(name, address[name], {"model": settings.draft, **engine}, service="draft")
        route = {"targets": ",".join(address[name] for name in targets)}
        if drafts:
            route["drafts"] = ",".join(address[name] for name in drafts)
        self._add("router", address["router"], {**route, "tokenizer": settings.target}, service="router")
        return workers

    def _targets(self) -> list[str]:
        """Names of the target workers; what comes before the dash is their role, or "target" for both."""
        settings = self.settings
        pools = {"prefill": settings.num_prefill, "decode": settings.num_decode}
        pools["target"] = (0 if any(pools.values()) else 1) if settings.num_targets is None else settings.num_targets
        return [f"{role}-{i}" for role, count in pools.items() for i in range(count)]

    def _add(self, name: str, address: str, flags: Mapping[str, object], *, service: Service) -> None:
        """Raises SettingsError for what the process would end of, seconds later."""
        host, _, port = address.rpartition(":")
        flags = {"host": host, "port": port, "config": self.settings.config, **flags}
        flags |= {"drain_seconds": self.settings.drain_seconds}
        flags = {setting: value for setting, value in flags.items() if value is not None}
        # No flags: a URL holds a password, and anybody can list a process's arguments.
        unseen: dict[str, object] = {"redis_url": self.redis.url}
        if self.settings.prefix_store and service != "draft":
            unseen["prefix_store"] = self.redis.url
        if self.settings.certs is not None:
            unseen |= _tls(service, self.settings.certs)
        self._check(service, {**flags, **unseen})
        command = [sys.executable, "-m", "services.cli.main", service]
        command += [f"--{setting.replace('_', '-')}={value}" for setting, value in flags.items()]
        environment = {**os.environ, PARENT: str(os.getpid())}
        environment |= {_SETTINGS[service].environment_name(setting): str(value) for setting, value in unseen.items()}
        environment |= self.settings.environment.get(name, {})
        if service != "router":
            environment.setdefault(f"OUTRIDER_{service.upper()}_MEMORY_SHARE", str(self._memory_share(service)))
            environment = worker_environment(environment)
        connect_to = partial(self._identity.connect, service=service)
        self.processes[name] = ServiceProcess(name, command, environment, address, self._log, connect_to)

    def _check(self, service: Service, given: Mapping[str, object]) -> None:
        """Logs what the environment or the file sets and the stack gives otherwise. Raises SettingsError."""
        _SETTINGS[service].load(**given)
        for setting, value in _SETTINGS[service].without_flags(self.settings.config).items():
            if setting in given and str(value) != str(given[setting]) and (service, setting) not in self._unused:
                self._unused.add((service, setting))
                self._log("stack", f"{service} setting {setting} is not used: the stack gives its own")

    def _memory_share(self, service: str) -> float:
        """What a worker may take of the memory that all workers of the stack share."""
        if service == "draft":
            return round(_DRAFT_MEMORY_SHARE / self.settings.num_drafts, 3)
        alone = self.settings.draft is None or self.settings.num_drafts == 0
        rest = _MEMORY_SHARE if alone else _MEMORY_SHARE - _DRAFT_MEMORY_SHARE
        return round(rest / len(self._targets()), 3)

    def _log(self, name: str, line: str) -> None:
        self.lines.append((name, line))
        if self._log_sink is not None:
            self._log_sink(name, line)


def router_identity(certs: Path) -> Identity:
    """The router's, by what `outrider certs` made for the default deployment. Raises StartupError."""
    own = WatchedFiles([certs / "router.pem", certs / "router-key.pem"], parse_chain)
    return Identity(own, WatchedFiles([certs / "ca.pem"], parse_authorities), None, DEFAULT_DEPLOYMENT)


def _tls(service: Service, certs: Path) -> dict[str, Path]:
    files = {"tls_cert": f"{service}.pem", "tls_key": f"{service}-key.pem", "tls_ca": "ca.pem"}
    return {setting: (certs / file).absolute() for setting, file in files.items()}
