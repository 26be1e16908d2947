"""The measurement of one pair: baseline and service in turns, so that what disturbs one disturbs all."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from outrider.v1 import inference_pb2, inference_pb2_grpc

from services.cli.stack import Stack, StackSettings
from shared.policy.shape import Shape
from tests.benchmarks.baseline import Baseline, run_baseline
from tests.benchmarks.errors import BenchmarkError
from tests.benchmarks.load import OFF, ON, LoadResult, Mode, run_load
from tests.benchmarks.memory import Memory, measure_memory
from tests.benchmarks.model_pair import Pair
from tests.benchmarks.prefix import PrefixResult, measure_prefix
from tests.benchmarks.second_router import second_router
from tests.support.service import COPYING_NOTHING, MODEL_ALONE, inference

PROMPT_TOKENS = 128
FIXED_SHAPES = (
    *map(Shape, range(1, 9)),
    *(Shape(2, 8), Shape(3, 8), Shape(3, 11), Shape(4, 11), Shape(4, 15), Shape(6, 15)),
)
"""What the adaptive γ is measured against at one stream: up to the most that it may choose itself."""

# So short a load is at the mercy of its few prompts and of the machine: a repeat runs it in turns with speculation
# off and on, until there were so many seconds without and so many loads of each, fixed shapes included.
_LEAST_SECONDS = 48.0
_LEAST_LOADS = 4
# Of each fixed shape: by the prompt alone the rate of a tree over that of a chain scatters by a tenth.
_LEAST_FIXED_LOADS = 8
_MOST_TURNS = 64
# And until it is known so well, as a share, how the two compare; on a noisy machine for at most so many times as long,
# and beside the fixed shapes, which take most of the time, no longer.
_MOST_ERROR = 0.01
_MOST_PROLONGED = 2
_BASELINE_PROMPTS = 2
# Loads with which γ may settle on this pair, at this number of streams.
_WARM_UPS = 5
_NUM_PREFIXES = 5

OnStep = Callable[[str], None]
"""Is told what is done next."""
Turn = list[LoadResult]
"""One load of each mode, or some of each."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured on each pair: `num_tokens` output tokens a stream, `repeats` of everything; with the draft model
    `inside` the target worker, or on a draft worker."""

    streams: tuple[int, ...]
    repeats: int
    num_tokens: int
    inside: bool = False

    @property
    def num_steps(self) -> int:
        """How often `measure_pair` calls `on_step`."""
        return 1 + len(self.streams) + self.repeats * (1 + len(self.streams)) + 1


@dataclass(frozen=True, slots=True)
class Stubs:
    """Clients of two routers on the same workers.

    Fixed shapes have a router to themselves: the one under measurement would learn from their rounds what
    its policy has to find out for itself. There each is a tenant of its own, who finds nobody else's prefixes.
    """

    service: inference_pb2_grpc.InferenceAsyncStub
    fixed: inference_pb2_grpc.InferenceAsyncStub

    async def run(self, prompts: Sequence[list[int]], num_tokens: int, mode: Mode) -> LoadResult:
        if mode.fixed is None:
            return await run_load(self.service, prompts, num_tokens, mode)
        return await run_load(self.fixed, prompts, num_tokens, mode, _key_of(mode.fixed))


@dataclass(frozen=True, slots=True)
class Repeat:
    """One pass over everything: a baseline, then speculation off and on at each number of streams, and at one
    stream each fixed shape."""

    baseline: Baseline
    loads: tuple[LoadResult, ...]

    def cell(self, streams: int, mode: Mode) -> list[LoadResult]:
        """The loads of that kind."""
        return [load for load in self.loads if (load.streams, load.mode) == (streams, mode)]


@dataclass(frozen=True, slots=True)
class PairResult:
    """All that was measured on a pair."""

    name: str
    repeats: tuple[Repeat, ...]
    prefixes: tuple[PrefixResult, ...]
    memory: dict[str, Memory]


async def measure_pair(pair: Pair, plan: Plan, on_step: OnStep) -> PairResult:
    """Runs the stack on `pair` in bf16, the workers in processes of their own, and measures it over gRPC.

    Raises StartupError if the stack does not start, BenchmarkError if a stream or baseline fails or a
    measurement is void.
    """
    on_step("starting the services")
    settings = StackSettings(
        target=str(pair.target),
        draft=str(pair.draft),
        num_drafts=0 if plan.inside else 1,
        port=0,
        dtype="bfloat16",
        environment={"target-0": COPYING_NOTHING, "draft": MODEL_ALONE},  # all modes have the same prompts
    )
    async with (
        Stack(settings) as stack,
        inference(stack) as stub,
        second_router(stack, ["target-0"], [] if plan.inside else ["draft"], _tenants()) as fixed_stub,
    ):
        stubs = Stubs(stub, fixed_stub)
        info = await stub.GetModelInfo(inference_pb2.GetModelInfoRequest())
        for streams in plan.streams:
            on_step(f"warm-up, {_count(streams)}")
            for mode in (OFF, *[ON] * _WARM_UPS, *[Mode(True, FIXED_SHAPES[-1])] * (streams == 1)):
                await stubs.run(_draw(pair, streams), plan.num_tokens, mode)
        repeats = [await _measure_repeat(pair, plan, index, stubs, on_step) for index in range(plan.repeats)]
        on_step("repeated prefixes")
        prefixes = [await measure_prefix(stub, pair.prompts, info.block_size) for _ in range(_NUM_PREFIXES)]
        memory = await measure_memory(stack, pair)
        check_undisturbed(stack)
    return PairResult(pair.name, tuple(repeats), tuple(prefixes), memory)


def order_of_loads(turn: int, with_fixed: bool) -> list[Mode]:
    """The modes of a turn, in an order that favours nobody.

    Every second turn goes backwards: over two of them every mode has the same mean position, so that a steady
    drift costs all the same. The fixed shapes come in between, once each, off and on before every four of
    these. They take part in every turn: of a dozen that are hardly apart the best of few loads is the luckiest.
    """
    modes = [OFF, ON]
    if with_fixed:
        modes = []
        for i in range(0, len(FIXED_SHAPES), 4):
            modes += [OFF, ON] if i % 8 == 0 else [ON, OFF]
            modes += [Mode(True, shape) for shape in FIXED_SHAPES[i : i + 4]]
    return modes if turn % 2 == 0 else modes[::-1]


def num_turns(off_seconds: float, with_fixed: bool) -> int:
    """Turns of a repeat, when a load without speculation takes so long: an even number, so that they balance."""
    num_loads = max(_LEAST_LOADS, math.ceil(_LEAST_SECONDS / off_seconds))
    turns = 2 * math.ceil(num_loads / (2 * order_of_loads(0, with_fixed).count(OFF)))
    return min(max(_LEAST_FIXED_LOADS if with_fixed else _LEAST_LOADS, turns), _MOST_TURNS)


def is_known(turns: Sequence[Turn], with_fixed: bool) -> bool:
    """Whether a repeat has been measured by these turns. It ends after an even number of them, whatever they show:
    how long it goes on depends on how they scatter, not on who is faster."""
    if not turns or len(turns) % 2:
        return False
    least = num_turns(fmean(load.seconds for turn in turns for load in turn if load.mode == OFF), with_fixed)
    if len(turns) < least:
        return False
    return with_fixed or len(turns) >= _MOST_PROLONGED * least or error_of_ratio(turns) <= _MOST_ERROR


def error_of_ratio(turns: Sequence[Turn]) -> float:
    """Standard error, as a share, of the time without speculation over that with it: of a ratio of two sums, taken
    from how turns, two at least, stray from it (Cochran, Sampling Techniques, 2.29)."""
    off, on = ([sum(load.seconds for load in turn if load.mode == mode) for turn in turns] for mode in (OFF, ON))
    ratio = sum(off) / sum(on)
    strays = [a - ratio * b for a, b in zip(off, on, strict=True)]
    return math.sqrt(sum(stray**2 for stray in strays) / (len(turns) - 1) * len(turns)) / sum(off)


async def _measure_repeat(pair: Pair, plan: Plan, index: int, stubs: Stubs, on_step: OnStep) -> Repeat:
    which = f"repeat {index + 1} of {plan.repeats}"
    on_step(f"{which}, transformers")
    baseline = await run_baseline(pair.target, pair.draft, _draw(pair, _BASELINE_PROMPTS), plan.num_tokens)
    loads = []
    for streams in plan.streams:
        on_step(f"{which}, {_count(streams)}")
        with_fixed = streams == 1
        turns: list[Turn] = []
        while not is_known(turns, with_fixed):
            modes = order_of_loads(index + len(turns), with_fixed)
            turns.append(await _measure_turn(pair, plan, streams, stubs, modes))
        loads += [load for turn in turns for load in turn]
    return Repeat(baseline, tuple(loads))


async def _measure_turn(pair: Pair, plan: Plan, streams: int, stubs: Stubs, modes: Sequence[Mode]) -> Turn:
    which = which_prompts(modes)
    prompts = _draw_alike(pair, streams, max(which) + 1)
    return [await stubs.run(prompts[i], plan.num_tokens, mode) for mode, i in zip(modes, which, strict=True)]


def which_prompts(modes: Sequence[Mode]) -> list[int]:
    """Of the prompts of a turn those that each has, by number. Others each time, where one would find the prefix of
    another; but the same for all fixed shapes, and for one load of the policy: chance would tell them apart."""
    counts = Counter[Mode]()
    which = []
    for mode in modes:
        which.append(1 if mode.fixed is not None else 2 * counts[mode] + mode.speculation)
        counts[mode] += 1
    return which


def _key_of(shape: Shape) -> str:
    return f"{shape.num_draft_tokens}-{shape.num_nodes}"


def _tenants() -> dict[str, str]:
    return {"OUTRIDER_ROUTER_API_KEYS": ",".join(f"{key}={key}" for key in map(_key_of, FIXED_SHAPES))}


def _draw(pair: Pair, count: int) -> Sequence[list[int]]:
    return [pair.prompts(PROMPT_TOKENS) for _ in range(count)]


def _draw_alike(pair: Pair, count: int, num_kinds: int) -> list[Sequence[list[int]]]:
    """The same prompts so many times, but for their first tokens: none finds the prefixes of another."""
    prompts = _draw(pair, count)
    first_tokens: dict[int, None] = {}
    while len(first_tokens) < num_kinds:
        first_tokens[pair.prompts(1)[0]] = None
    return [[[first, *prompt[1:]] for prompt in prompts] for first in first_tokens]


def _count(streams: int) -> str:
    return f"{streams} {'stream' if streams == 1 else 'streams'}"


def check_undisturbed(stack: Stack) -> None:
    """Raises BenchmarkError if a service died meanwhile: the streams survive that, the numbers do not."""
    restarted = [name for name, process in stack.processes.items() if process.restarts]
    if restarted:
        raise BenchmarkError(f"died and were started again while being measured: {', '.join(restarted)}")
