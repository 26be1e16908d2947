"""Target workers that share the machine's two cores, and the stack that runs them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from outrider.v1 import target_pb2_grpc, worker_pb2

from services.cli.stack import Stack, StackSettings
from services.simulator.cluster import Pools
from shared.rpc.channel import connect
from tests.benchmarks.load import OFF, run_load
from tests.benchmarks.measurement import check_undisturbed
from tests.benchmarks.model_pair import Pair
from tests.support.service import inference, wait_until_idle

# What every worker has done before anything is measured: connections, threads and memory are there then.
_WARM_UP_STREAMS = 4
_WARM_UP_PROMPT_TOKENS = 200
_WARM_UP_TOKENS = 8
# Some 40,000 tokens: more than any trace here has.
_KV_CACHE_GIB = "1"


@dataclass(frozen=True, slots=True)
class Setup:
    """How many workers of which role, with so many threads each and so many tokens in a step at most."""

    name: str
    pools: Pools
    num_threads: int
    max_batch_tokens: int = 512

    @property
    def workers(self) -> list[str]:
        """The names of their processes."""
        counts = {"prefill": self.pools.num_prefill, "decode": self.pools.num_decode, "target": self.pools.num_both}
        return [f"{role}-{i}" for role, count in counts.items() for i in range(count)]


COLOCATED = Setup("2 both", Pools(num_both=2), num_threads=1)
APART = Setup("1 prefill + 1 decode", Pools(num_prefill=1, num_decode=1), num_threads=1)


@asynccontextmanager
async def serving(
    setup: Setup, pair: Pair, environment: Mapping[str, Mapping[str, str]] | None = None
) -> AsyncIterator[Stack]:
    """Runs the setup on the pair's target in bf16, without a drafter, warmed up, every cache empty.

    `environment` adds to that of processes, by their names. Raises StartupError if it does not start, BenchmarkError if
    a process died meanwhile.
    """
    added = dict(environment or {})
    for name in setup.workers:
        budget = {"OUTRIDER_TARGET_MAX_BATCH_TOKENS": str(setup.max_batch_tokens)}
        # Asked for, and so taken at start: as in a worker all of whose cache has been in use.
        cache = {"OUTRIDER_TARGET_KV_CACHE_GIB": _KV_CACHE_GIB}
        added[name] = {**budget, **cache, **added.get(name, {})}
    settings = StackSettings(
        target=str(pair.target),
        draft=None,
        num_targets=setup.pools.num_both,
        num_prefill=setup.pools.num_prefill,
        num_decode=setup.pools.num_decode,
        port=0,
        dtype="bfloat16",
        num_threads=setup.num_threads,
        environment=added,
    )
    async with Stack(settings) as stack:
        async with inference(stack) as stub:
            prompts = [pair.prompts(_WARM_UP_PROMPT_TOKENS) for _ in range(_WARM_UP_STREAMS)]
            await run_load(stub, prompts, _WARM_UP_TOKENS, OFF)
        await wait_until_idle(stack)
        yield stack
        check_undisturbed(stack)


async def worker_info(stack: Stack, name: str) -> worker_pb2.WorkerInfo:
    """What the worker process says of itself."""
    async with connect(stack.processes[name].address) as channel:
        info: worker_pb2.WorkerInfo = await target_pb2_grpc.TargetStub(channel).GetWorkerInfo(
            worker_pb2.GetWorkerInfoRequest()
        )
    return info
