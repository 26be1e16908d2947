"""Faults at random instants under seeded streams: each of which must go on as if nothing had been."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from outrider.v1 import inference_pb2_grpc

from services.cli.stack import Stack, StackSettings
from shared.rpc.channel import connect
from shared.security.identity import Service
from tests.support.proxy import Proxy
from tests.support.service import Generated, collect, request, wait_until_idle

NUM_STREAMS = 16
NUM_TOKENS = 64
NUM_PROMPTS = 24
READY_SECONDS = 120.0
# Seconds between two faults, at most, and those that something is stopped, stalled or late for.
MAX_PAUSE_SECONDS = 3.0
STOPPED_SECONDS = (0.2, 5.0)
LATE_SECONDS = 0.05

PROMPT = "class Tokenizer:\n    def __init__(self, vocabulary):\n        self.vocabulary = vocabulary\n"


class Fault(Enum):
    """What happens to a worker, or to the lines that lead to it."""

    KILL = "kill"
    STOP = "stop"
    RESTART = "restart"
    CUT = "cut"
    STALL = "stall"
    DELAY = "delay"


class ChaosStack(Stack):
    """Routers and peers reach every worker by a `Proxy`."""

    def __init__(self, settings: StackSettings) -> None:
        super().__init__(settings)
        self.proxies: dict[str, Proxy] = {}
        self._starting: list[asyncio.Task[None]] = []

    def _add(self, name: str, address: str, flags: Mapping[str, object], *, service: Service) -> None:
        if service == "router":
            reached = {self.processes[worker].address: proxy.address for worker, proxy in self.proxies.items()}
            flags = {
                key: ",".join(reached[each] for each in str(value).split(","))
                if key in ("targets", "drafts")
                else value
                for key, value in flags.items()
            }
        else:
            proxy = self.proxies[name] = Proxy(address)
            self._starting.append(asyncio.create_task(proxy.start()))
        super()._add(name, address, flags, service=service)

    async def stop(self) -> None:
        await super().stop()
        for proxy in self.proxies.values():
            await proxy.close()


@asynccontextmanager
async def chaos_stack(kv_transfer: str = "auto", **settings: Any) -> AsyncIterator[ChaosStack]:
    """Two drafters, two prefill and two decode workers, in float32, and what they compute is kept in Redis."""
    pools = {"num_prefill": 2, "num_decode": 2, "num_drafts": 2, "prefix_store": True} | settings
    names = [f"{role}-{i}" for role in ("prefill", "decode") for i in range(2)]
    environment = {name: {"OUTRIDER_TARGET_KV_TRANSFER": kv_transfer} for name in names}
    made = StackSettings(port=0, dtype="float32", num_threads=1, drain_seconds=10.0, environment=environment, **pools)
    async with ChaosStack(made) as stack:
        yield stack


@dataclass
class Campaign:
    """`run` keeps streams going while faults happen; what they gave is held to `expected`, by prompt."""

    stack: ChaosStack
    seed: int
    report: Callable[[str], None] = lambda line: None
    num_streams: int = 0
    longest_seconds: float = 0.0
    faults: Counter[tuple[str, Fault]] = field(default_factory=Counter)
    _expected: dict[int, list[list[int]]] = field(default_factory=dict)
    _healing: dict[str, asyncio.Task[None]] = field(default_factory=dict)

    async def run(self, num_faults: int) -> None:
        """Raises AssertionError for a stream that differs or fails, and for anything left behind."""
        answers = await asyncio.gather(*(self._generate(number) for number in range(NUM_PROMPTS)))
        self._expected = {i: [output.token_ids for output in answer.outputs] for i, answer in enumerate(answers)}
        await wait_until_idle(self.stack)
        stopping = asyncio.Event()
        streams = [asyncio.create_task(self._stream(i, stopping)) for i in range(NUM_STREAMS)]
        inflicting = asyncio.create_task(self._inflict(num_faults))
        try:
            # Streams end only by failing.
            await asyncio.wait([inflicting, *streams], return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.set()
            inflicting.cancel()
            await asyncio.gather(inflicting, *self._healing.values(), return_exceptions=True)
            results = await asyncio.gather(*streams, return_exceptions=True)
        failures = [result for result in results if isinstance(result, BaseException)]
        if failures:
            raise failures[0]
        if not inflicting.cancelled() and (error := inflicting.exception()) is not None:
            raise error
        await wait_until_idle(self.stack, 60.0)

    async def _stream(self, number: int, stopping: asyncio.Event) -> None:
        dice = random.Random(f"{self.seed} {number}")
        while not stopping.is_set():
            prompt = dice.randrange(NUM_PROMPTS)
            began = time.monotonic()
            answer = await self._generate(prompt)
            seconds = time.monotonic() - began
            self.longest_seconds = max(self.longest_seconds, seconds)
            self.num_streams += 1
            given = [output.token_ids for output in answer.outputs]
            assert given == self._expected[prompt], f"stream of prompt {prompt} differs, {dict(self.faults)}"

    async def _generate(self, number: int) -> Generated:
        made = request(
            PROMPT * (1 + number % 5) + f"    # {number}\n",
            gamma=(0, 3, None)[number % 3],
            max_tokens=NUM_TOKENS,
            temperature=0.8,
            seed=number,
            n=1 + number % 3,
            ignore_eos=True,
        )
        async with connect(self.stack.router_address) as channel:
            return await collect(inference_pb2_grpc.InferenceStub(channel).Generate(made))

    async def _inflict(self, num_faults: int) -> None:
        """One fault after another, each on a worker that is well, and never on the last of its kind."""
        dice = random.Random(self.seed)
        for number in range(num_faults):
            await asyncio.sleep(dice.uniform(0, MAX_PAUSE_SECONDS))
            name = dice.choice([*self.stack.proxies, "redis"])
            fault = Fault.KILL if name == "redis" else dice.choice(list(Fault))
            if name != "redis":
                await self._until_others_are_well(name)
            self.faults[name.partition("-")[0], fault] += 1
            self.report(f"{number + 1}/{num_faults} {fault.value} {name}; {self.num_streams} streams ended so far")
            if name == "redis":
                self._kill_redis()
            else:
                seconds = dice.uniform(*STOPPED_SECONDS)
                self._healing[name] = asyncio.create_task(self._suffer(name, fault, seconds))
        await asyncio.gather(*self._healing.values())

    async def _until_others_are_well(self, name: str) -> None:
        kind = name.partition("-")[0]
        for other in self.stack.proxies:
            if other.partition("-")[0] == kind:
                if other in self._healing:
                    await self._healing[other]
                async with asyncio.timeout(READY_SECONDS):
                    await self.stack.processes[other].ready.wait()

    async def _suffer(self, name: str, fault: Fault, seconds: float) -> None:
        """Until it is over, and the worker is back."""
        process, proxy = self.stack.processes[name], self.stack.proxies[name]
        match fault:
            case Fault.KILL:
                process.kill()
            case Fault.RESTART:
                process.restart()
            case Fault.STOP:
                process._signal(signal.SIGSTOP)
                await asyncio.sleep(seconds)
                process._signal(signal.SIGCONT)
            case Fault.CUT:
                proxy.cut()
            case Fault.STALL:
                proxy.stall()
                await asyncio.sleep(seconds)
                proxy.resume()
            case Fault.DELAY:
                proxy.delay_seconds = LATE_SECONDS
                await asyncio.sleep(seconds)
                proxy.delay_seconds = 0.0
        async with asyncio.timeout(READY_SECONDS):
            await process.ready.wait()
        # Routers are connected again, too.
        await asyncio.sleep(1.0)

    def _kill_redis(self) -> None:
        redis = self.stack.redis
        if redis._process is not None:
            redis._process.kill()
