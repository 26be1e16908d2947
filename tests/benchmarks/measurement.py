"""The measurement of one pair: baseline and service in turns, so that what disturbs one disturbs all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from outrider.v1 import inference_pb2, inference_pb2_grpc

from services.cli.stack import Stack, StackSettings
from tests.benchmarks.baseline import Baseline, run_baseline
from tests.benchmarks.errors import BenchmarkError
from tests.benchmarks.load import LoadResult, run_load
from tests.benchmarks.model_pair import Pair
from tests.benchmarks.prefix import PrefixResult, measure_prefix
from tests.support.service import inference

PROMPT_TOKENS = 128

# So short a load is at the mercy of its few prompts and of the machine: with fewer streams, it is run more often.
_LEAST_STREAMS = 4
_BASELINE_PROMPTS = 2
# Enough to let γ settle on this pair, at this number of streams.
_WARM_UP_TOKENS = 48
_NUM_PREFIXES = 5

OnStep = Callable[[str], None]
"""Is told what is done next."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured on each pair: `num_tokens` output tokens a stream, `repeats` of everything."""

    streams: tuple[int, ...]
    repeats: int
    num_tokens: int

    @property
    def num_steps(self) -> int:
        """How often `measure_pair` calls `on_step`."""
        return 1 + len(self.streams) + self.repeats * (1 + len(self.streams)) + 1


@dataclass(frozen=True, slots=True)
class Repeat:
    """One pass over everything: a baseline, then speculation off and on at each number of streams."""

    baseline: Baseline
    loads: tuple[LoadResult, ...]

    def cell(self, streams: int, *, speculation: bool) -> list[LoadResult]:
        """The loads of that kind."""
        return [load for load in self.loads if (load.streams, load.speculation) == (streams, speculation)]


@dataclass(frozen=True, slots=True)
class PairResult:
    """All that was measured on a pair."""

    name: str
    repeats: tuple[Repeat, ...]
    prefixes: tuple[PrefixResult, ...]


async def measure_pair(pair: Pair, plan: Plan, on_step: OnStep) -> PairResult:
    """Runs the stack on `pair` in bf16, the workers in processes of their own, and measures it over gRPC.

    Raises StartupError if the stack does not start, BenchmarkError if a stream or baseline fails or a
    measurement is void.
    """
    on_step("starting the services")
    settings = StackSettings(target=str(pair.target), draft=str(pair.draft), port=0, dtype="bfloat16")
    async with Stack(settings) as stack, inference(stack) as stub:
        info = await stub.GetModelInfo(inference_pb2.GetModelInfoRequest())
        for streams in plan.streams:
            on_step(f"warm-up, {_count(streams)}")
            for speculation in (False, True):
                await run_load(stub, _draw(pair, streams), _WARM_UP_TOKENS, speculation=speculation)
        repeats = [await _measure_repeat(pair, plan, index, stub, on_step) for index in range(plan.repeats)]
        on_step("repeated prefixes")
        prefixes = [await measure_prefix(stub, pair.prompts, info.block_size) for _ in range(_NUM_PREFIXES)]
        _check_undisturbed(stack)
    return PairResult(pair.name, tuple(repeats), tuple(prefixes))


async def _measure_repeat(
    pair: Pair, plan: Plan, index: int, stub: inference_pb2_grpc.InferenceAsyncStub, on_step: OnStep
) -> Repeat:
    """Every second repeat has speculation on first: what drifts favours neither side."""
    which = f"repeat {index + 1} of {plan.repeats}"
    on_step(f"{which}, transformers")
    baseline = await run_baseline(pair.target, pair.draft, _draw(pair, _BASELINE_PROMPTS), plan.num_tokens)
    loads = []
    for streams in plan.streams:
        on_step(f"{which}, {_count(streams)}")
        off_and_on = (False, True) if index % 2 == 0 else (True, False)
        for speculation in off_and_on * max(1, _LEAST_STREAMS // streams):
            loads.append(await run_load(stub, _draw(pair, streams), plan.num_tokens, speculation=speculation))
    return Repeat(baseline, tuple(loads))


def _draw(pair: Pair, count: int) -> Sequence[list[int]]:
    return [pair.prompts(PROMPT_TOKENS) for _ in range(count)]


def _count(streams: int) -> str:
    return f"{streams} {'stream' if streams == 1 else 'streams'}"


def _check_undisturbed(stack: Stack) -> None:
    """Raises BenchmarkError if a service died meanwhile: the streams survive that, the numbers do not."""
    restarted = [name for name, process in stack.processes.items() if process.restarts]
    if restarted:
        raise BenchmarkError(f"died and were started again while being measured: {', '.join(restarted)}")
